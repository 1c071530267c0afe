#include "checks.h"

#include <c10/util/Exception.h>

#include <cmath>
#include <string>
#include <vector>

#include "argument_checks.h"

namespace mha_ext {
namespace {

void check_variants(const char* function, const Variants& v, const PairSizes& sizes, const at::Tensor& query) {
  if (v.key_range.defined()) {
    const Argument argument{function, "key_range"};
    TORCH_CHECK_TYPE(v.key_range.scalar_type() == at::kInt, argument, " be int32, got ", v.key_range.scalar_type());
    check_device(argument, v.key_range, query);
    check_rank(argument, v.key_range, 3, "(2, batch, query length)");
    check_size(argument, v.key_range, 0, 2, "a first and a last bound:");
    TORCH_CHECK_VALUE(v.key_range.sym_size(1) == sizes.batch || v.key_range.sym_size(1) == 1, argument,
                      " have batch size 1 or ", sizes.batch, " (size 1), got ", v.key_range.sym_size(1));
    check_size(argument, v.key_range, 2, sizes.queries, "query's length");
  }
  if (v.relative_bias.defined()) {
    const Argument argument{function, "relative_bias"};
    check_float(argument, v.relative_bias);
    check_device(argument, v.relative_bias, query);
    const c10::SymInt distances = (sizes.queries + sizes.keys - 1).max(0);
    const std::array<c10::SymInt, 3> shape{sizes.batch, sizes.heads, distances};
    const bool fits = broadcasts(v.relative_bias, shape) && v.relative_bias.sym_size(2) == distances;
    TORCH_CHECK_VALUE(fits, argument, " have 3 dimensions, (batch or 1, heads or 1, query length + key length - 1) = ",
                      c10::SymIntArrayRef(shape), ", got ", v.relative_bias.sym_sizes());
  }
  if (v.sink.defined()) {
    const Argument argument{function, "sink"};
    check_float(argument, v.sink);
    check_device(argument, v.sink, query);
    TORCH_CHECK_VALUE(v.sink.dim() == 1 || v.sink.dim() == 2, argument,
                      " have 1 dimension (heads) or 2 (batch, heads), got ", v.sink.dim());
    check_size(argument, v.sink, v.sink.dim() - 1, sizes.heads, "query's number of heads");
    if (v.sink.dim() == 2) check_size(argument, v.sink, 0, sizes.batch, "query's batch size");
  }
  for (const auto& [name, limit] : {std::pair{"window_left", v.window_left}, {"window_right", v.window_right}}) {
    TORCH_CHECK_VALUE(limit >= kNoLimit, function, ": ", name, " must be at least 0, or -1 for no limit, got ", limit);
  }
  TORCH_CHECK_VALUE(v.softcap >= 0.0 && std::isfinite(v.softcap), function,
                    ": softcap must be positive and finite, or 0 for none, got ", v.softcap);
}

void check_key_value(const char* function, const AttentionArguments& a) {
  const Argument key{function, "key"};
  check_rank(key, a.key, 4, "(batch, key/value heads, key length, head_dim)");
  check_same_kind(key, a.key, a.query);
  check_size(key, a.key, 0, a.query.sym_size(0), "query's batch size");
  check_size(key, a.key, 3, a.query.sym_size(3), "query's head_dim");
  const c10::SymInt heads = a.query.sym_size(1);
  const c10::SymInt kv_heads = a.key.sym_size(1);
  TORCH_CHECK_VALUE(kv_heads >= 1 && heads % kv_heads == 0, key, " have a number of heads that divides query's ", heads,
                    " (size 1), got ", kv_heads);
  TORCH_CHECK_VALUE(a.num_appended_keys >= 0 && a.num_appended_keys <= a.key.sym_size(2), function,
                    ": num_appended_keys must be between 0 and the key length ", a.key.sym_size(2), ", got ",
                    a.num_appended_keys);
  if (!a.value.defined()) return;
  const Argument value{function, "value"};
  check_rank(value, a.value, 4, "(batch, key/value heads, key length, value head_dim)");
  check_same_kind(value, a.value, a.query);
  check_size(value, a.value, 0, a.query.sym_size(0), "query's batch size");
  check_size(value, a.value, 1, kv_heads, "key's number of heads");
  check_size(value, a.value, 2, a.key.sym_size(2), "key's length");
  TORCH_CHECK_VALUE(a.value.sym_size(3) >= 1, value, " have head_dim at least 1 (size 3), got ", a.value.sym_size(3));
}

void check_lse(const char* function, const AttentionArguments& a, const at::Tensor& lse) {
  const std::array<c10::SymInt, 3> shape{a.query.sym_size(0), a.query.sym_size(1), a.query.sym_size(2)};
  check_shape({function, "lse"}, lse, shape);
  check_lse_kind({function, "lse"}, lse, a.query);
}

// What the forward gave.
struct Results {
  const at::Tensor &out, &lse, &rounding;
};

std::array<c10::SymInt, 4> out_shape(const AttentionArguments& a) {
  return {a.query.sym_size(0), a.query.sym_size(1), a.query.sym_size(2), a.value.sym_size(3)};
}

void check_results(const char* function, const AttentionArguments& a, const Results& results) {
  const auto shape = out_shape(a);
  check_lse(function, a, results.lse);
  check_shape({function, "out"}, results.out, shape);
  check_same_kind({function, "out"}, results.out, a.query);
  check_rounding({function, "rounding"}, results.rounding, shape, a.query);
}

struct Named {
  const char* name;
  const at::Tensor& tensor;
};

// Of out and lse, or their tangents; undefined ones are zero.
void check_cotangents(const char* function, const AttentionArguments& a, const Named& out, const Named& lse) {
  if (out.tensor.defined()) {
    check_shape({function, out.name}, out.tensor, out_shape(a));
    check_same_kind({function, out.name}, out.tensor, a.query);
  }
  if (lse.tensor.defined()) {
    const auto shape = out_shape(a);
    check_shape({function, lse.name}, lse.tensor, c10::SymIntArrayRef(shape).slice(0, 3));
    check_lse_kind({function, lse.name}, lse.tensor, a.query);
  }
}

void check_tangents(const char* function, const AttentionArguments& a, const Tangents& tangents) {
  const std::array<Named, kNumGradients> inputs{{{"query", a.query},
                                                 {"key", a.key},
                                                 {"value", a.value},
                                                 {"attn_mask", a.attn_mask},
                                                 {"key_padding_mask", a.key_padding_mask},
                                                 {"relative_bias", a.variants.relative_bias},
                                                 {"sink", a.variants.sink}}};
  for (size_t i = 0; i < kNumGradients; ++i) {
    if (!tangents[i].defined()) continue;
    const std::string name = std::string("the tangent of ") + inputs[i].name;
    const Argument argument{function, name.c_str()};
    TORCH_CHECK_VALUE(inputs[i].tensor.defined(), Argument{function, inputs[i].name},
                      " be given for a tangent of it to be given, got none");
    check_float(argument, tangents[i]);
    check_shape(argument, tangents[i], inputs[i].tensor.sym_sizes());
    TORCH_CHECK_TYPE(tangents[i].scalar_type() == inputs[i].tensor.scalar_type(), argument, " have the dtype of ",
                     inputs[i].name, ", ", inputs[i].tensor.scalar_type(), ", got ", tangents[i].scalar_type());
    check_device(argument, tangents[i], a.query);
  }
}

// The first gradients of a mask of wanted ones.
void check_wanted(const char* function, const AttentionArguments& a, const bool* wanted) {
  check_mask_gradient({function, "attn_mask"}, a.attn_mask, wanted[3]);
  check_mask_gradient({function, "key_padding_mask"}, a.key_padding_mask, wanted[4]);
  check_is_given({function, "relative_bias"}, a.variants.relative_bias, wanted[5]);
  check_is_given({function, "sink"}, a.variants.sink, wanted[6]);
}

}  // namespace

void check_attention(const char* function, const AttentionArguments& a) {
  const Argument query{function, "query"};
  check_rank(query, a.query, 4, "(batch, heads, query length, head_dim)");
  check_float(query, a.query);
  TORCH_CHECK_VALUE(a.query.sym_size(1) >= 1, query, " have at least 1 head (size 1), got ", a.query.sym_size(1));
  TORCH_CHECK_VALUE(a.query.sym_size(3) >= 1, query, " have head_dim at least 1 (size 3), got ", a.query.sym_size(3));
  check_key_value(function, a);
  check_numbers(function, a.dropout_p, a.causal, a.scale);
  check_dropout_seed(function, a.dropout_seed, a.dropout_p, a.query.sym_size(0), a.query);
  const PairSizes sizes{a.query.sym_size(0), a.query.sym_size(1), a.query.sym_size(2),
                        a.key.sym_size(2) - a.num_appended_keys};
  check_masks(function, a.attn_mask, a.key_padding_mask, sizes, a.query);
  check_variants(function, a.variants, sizes, a.query);
}

void check_attention_for_backward(const AttentionArguments& a, int64_t weights) {
  const char* function = "attention_for_backward";
  check_attention(function, a);
  TORCH_CHECK_VALUE(weights >= kNoWeights && weights <= kWeightsPerHead, function,
                    ": weights must be 0 (none), 1 (mean over heads) or 2 (per head), got ", weights);
}

void check_attention_backward(const AttentionArguments& a, const AttentionCotangents& c) {
  const char* function = "attention_backward";
  check_attention(function, a);
  check_results(function, a, {c.out, c.lse, c.rounding});
  check_cotangents(function, a, {"grad_out", c.grad_out}, {"grad_lse", c.grad_lse});
  check_wanted(function, a, c.output_mask.data());
}

void check_attention_jvp(const AttentionArguments& a, const ForwardTangents& t) {
  const char* function = "attention_jvp";
  check_attention(function, a);
  check_results(function, a, {t.out, t.lse, t.rounding});
  check_tangents(function, a, t.inputs);
}

void check_attention_backward_jvp(const AttentionArguments& a, const BackwardTangents& t) {
  const char* function = "attention_backward_jvp";
  const AttentionCotangents& c = t.cotangents;
  check_attention(function, a);
  check_results(function, a, {c.out, c.lse, c.rounding});
  check_cotangents(function, a, {"grad_out", c.grad_out}, {"grad_lse", c.grad_lse});
  check_cotangents(function, a, {"grad_out_tangent", t.grad_out}, {"grad_lse_tangent", t.grad_lse});
  check_tangents(function, a, t.inputs);
  check_wanted(function, a, t.output_mask.data());
}

void check_attention_weights_backward(const AttentionArguments& a, const WeightsCotangents& c) {
  const char* function = "attention_weights_backward";
  check_attention(function, a);
  check_lse(function, a, c.lse);
  std::vector<c10::SymInt> shape{a.query.sym_size(0), a.query.sym_size(1), a.query.sym_size(2), a.key.sym_size(2)};
  if (c.average) shape.erase(shape.begin() + 1);
  check_shape({function, "grad_weights"}, c.grad_weights, shape);
  check_same_kind({function, "grad_weights"}, c.grad_weights, a.query);
  check_mask_gradient({function, "attn_mask"}, a.attn_mask, c.output_mask[2]);
  check_mask_gradient({function, "key_padding_mask"}, a.key_padding_mask, c.output_mask[3]);
  check_is_given({function, "relative_bias"}, a.variants.relative_bias, c.output_mask[4]);
  check_is_given({function, "sink"}, a.variants.sink, c.output_mask[5]);
}

void check_paged_attention(const PagedArguments& a) {
  const char* function = "paged_attention";
  const Argument query{function, "query"}, key{function, "key_pages"}, value{function, "value_pages"};
  check_rank(query, a.query, 4, "(batch, heads, query length, head_dim)");
  check_float(query, a.query);
  check_rank(key, a.key_pages, 4, "(pages, key/value heads, page size, head_dim)");
  check_same_kind(key, a.key_pages, a.query);
  check_size(key, a.key_pages, 3, a.query.sym_size(3), "query's head_dim");
  const c10::SymInt heads = a.query.sym_size(1), kv_heads = a.key_pages.sym_size(1);
  TORCH_CHECK_VALUE(kv_heads >= 1 && heads >= 1 && heads % kv_heads == 0, key,
                    " have a number of heads that divides query's ", heads, " (size 1), got ", kv_heads);
  TORCH_CHECK_VALUE(a.key_pages.sym_size(2) >= 1, key, " have a page size of at least 1 (size 2), got 0");
  check_rank(value, a.value_pages, 4, "(pages, key/value heads, page size, value head_dim)");
  check_same_kind(value, a.value_pages, a.query);
  for (int64_t dim = 0; dim < 3; ++dim) check_size(value, a.value_pages, dim, a.key_pages.sym_size(dim), "key_pages'");
  const Argument table{function, "page_table"};
  TORCH_CHECK_TYPE(a.page_table.scalar_type() == at::kInt, table, " be int32, got ", a.page_table.scalar_type());
  check_device(table, a.page_table, a.query);
  check_rank(table, a.page_table, 2, "(batch, pages of a row)");
  check_size(table, a.page_table, 0, a.query.sym_size(0), "query's batch size");
  check_numbers(function, 0.0, kNotCausal, a.scale);
  const PairSizes sizes{a.query.sym_size(0), heads, a.query.sym_size(2), a.page_table.sym_size(1)};
  check_variants(function, Variants{a.key_range, {}, a.sink, kNoLimit, kNoLimit, a.softcap}, sizes, a.query);
}

}  // namespace mha_ext
