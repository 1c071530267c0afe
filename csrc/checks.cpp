#include "checks.h"

#include <ATen/core/Tensor.h>
#include <c10/util/Exception.h>

#include <cmath>

namespace mha_ext {
namespace {

// One argument in an error message: "<function>: <name> must ...".
struct Argument {
  const char* function;
  const char* name;
};

std::ostream& operator<<(std::ostream& stream, const Argument& argument) {
  return stream << argument.function << ": " << argument.name << " must";
}

bool is_supported_float(at::ScalarType dtype) {
  return dtype == at::kDouble || dtype == at::kFloat || dtype == at::kBFloat16 || dtype == at::kHalf;
}

void check_float(const Argument& argument, const at::Tensor& tensor) {
  TORCH_CHECK_TYPE(is_supported_float(tensor.scalar_type()), argument,
                   " be float64, float32, bfloat16 or float16, got ", tensor.scalar_type());
}

void check_rank(const Argument& argument, const at::Tensor& tensor, int64_t rank, const char* shape) {
  TORCH_CHECK_VALUE(tensor.dim() == rank, argument, " have ", rank, " dimensions ", shape, ", got ", tensor.dim());
}

void check_size(const Argument& argument, const at::Tensor& tensor, int64_t dim, const c10::SymInt& expected,
                const char* meaning) {
  TORCH_CHECK_VALUE(tensor.sym_size(dim) == expected, argument, " have ", meaning, " ", expected, " (size ", dim,
                    "), got ", tensor.sym_size(dim));
}

void check_device(const Argument& argument, const at::Tensor& tensor, const at::Tensor& query) {
  TORCH_CHECK_VALUE(tensor.device() == query.device(), argument, " be on query's device ", query.device(), ", got ",
                    tensor.device());
}

void check_same_kind(const Argument& argument, const at::Tensor& tensor, const at::Tensor& query) {
  TORCH_CHECK_TYPE(tensor.scalar_type() == query.scalar_type(), argument, " have query's dtype ", query.scalar_type(),
                   ", got ", tensor.scalar_type());
  check_device(argument, tensor, query);
}

void check_mask_kind(const Argument& argument, const at::Tensor& mask, const at::Tensor& query) {
  TORCH_CHECK_TYPE(mask.scalar_type() == at::kBool || is_supported_float(mask.scalar_type()), argument,
                   " be bool or floating point, got ", mask.scalar_type());
  check_device(argument, mask, query);
}

bool broadcasts(const at::Tensor& mask, c10::SymIntArrayRef shape) {
  if (mask.dim() != static_cast<int64_t>(shape.size())) return false;
  for (size_t i = 0; i < shape.size(); ++i) {
    if (mask.sym_size(static_cast<int64_t>(i)) != 1 && mask.sym_size(static_cast<int64_t>(i)) != shape[i]) return false;
  }
  return true;
}

// The masks' four axes in full.
struct PairSizes {
  c10::SymInt batch, heads, queries, keys;
};

void check_masks(const char* function, const at::Tensor& attn_mask, const at::Tensor& key_padding_mask,
                 const PairSizes& sizes, const at::Tensor& query) {
  if (attn_mask.defined()) {
    const Argument argument{function, "attn_mask"};
    check_mask_kind(argument, attn_mask, query);
    const std::array<c10::SymInt, 4> shape{sizes.batch, sizes.heads, sizes.queries, sizes.keys};
    TORCH_CHECK_VALUE(broadcasts(attn_mask, shape), argument, " have 4 dimensions that broadcast to ",
                      c10::SymIntArrayRef(shape), ", got ", attn_mask.sym_sizes());
  }
  if (key_padding_mask.defined()) {
    const Argument argument{function, "key_padding_mask"};
    check_mask_kind(argument, key_padding_mask, query);
    check_rank(argument, key_padding_mask, 2, "(batch, key length)");
    TORCH_CHECK_VALUE(key_padding_mask.sym_size(0) == 1 || key_padding_mask.sym_size(0) == sizes.batch, argument,
                      " have batch size 1 or ", sizes.batch, " (size 0), got ", key_padding_mask.sym_size(0));
    check_size(argument, key_padding_mask, 1, sizes.keys, "key length");
  }
}

void check_variants(const char* function, const Variants& v, const PairSizes& sizes, const at::Tensor& query) {
  if (v.key_range.defined()) {
    const Argument argument{function, "key_range"};
    TORCH_CHECK_TYPE(v.key_range.scalar_type() == at::kInt, argument, " be int32, got ", v.key_range.scalar_type());
    check_device(argument, v.key_range, query);
    check_rank(argument, v.key_range, 3, "(2, batch, query length)");
    check_size(argument, v.key_range, 0, 2, "a first and a last bound:");
    TORCH_CHECK_VALUE(v.key_range.sym_size(1) == 1 || v.key_range.sym_size(1) == sizes.batch, argument,
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
    check_rank(argument, v.sink, 1, "(heads)");
    check_size(argument, v.sink, 0, sizes.heads, "query's number of heads");
  }
  for (const auto& [name, limit] : {std::pair{"window_left", v.window_left}, {"window_right", v.window_right}}) {
    TORCH_CHECK_VALUE(limit >= kNoLimit, function, ": ", name, " must be at least 0, or -1 for no limit, got ", limit);
  }
  TORCH_CHECK_VALUE(v.softcap >= 0.0 && std::isfinite(v.softcap), function,
                    ": softcap must be positive and finite, or 0 for none, got ", v.softcap);
}

void check_numbers(const char* function, double dropout_p, int64_t causal, std::optional<double> scale) {
  TORCH_CHECK_VALUE(dropout_p >= 0.0 && dropout_p < 1.0, function, ": dropout_p must be in [0, 1), got ", dropout_p);
  TORCH_CHECK_VALUE(causal >= kNotCausal && causal <= kLowerRightPositions, function,
                    ": causal must be 0 (no), 1 (upper left), 2 (lower right) or 3 (no, but positions count from the "
                    "lower right), got ",
                    causal);
  TORCH_CHECK_VALUE(!scale.has_value() || std::isfinite(*scale), function, ": scale must be finite, got ", *scale);
}

void check_dropout_seed(const char* function, const at::Tensor& seed, double dropout_p, const at::Tensor& query) {
  TORCH_CHECK_VALUE(seed.defined() == (dropout_p > 0.0), function,
                    ": dropout_seed must be given if and only if dropout_p > 0, got dropout_p ", dropout_p,
                    seed.defined() ? " with" : " without", " a seed");
  if (!seed.defined()) return;
  const Argument argument{function, "dropout_seed"};
  TORCH_CHECK_TYPE(seed.scalar_type() == at::kLong, argument, " be int64, got ", seed.scalar_type());
  TORCH_CHECK_VALUE(seed.sym_numel() == 1, argument, " have one element, got shape ", seed.sym_sizes());
  check_device(argument, seed, query);
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

void check_shape(const Argument& argument, const at::Tensor& tensor, c10::SymIntArrayRef shape) {
  TORCH_CHECK_VALUE(tensor.sym_sizes() == shape, argument, " have shape ", shape, ", got ", tensor.sym_sizes());
}

// Of out's shape, or empty, with one axis; always so for float32 and float64.
void check_rounding(const Argument& argument, const at::Tensor& rounding, c10::SymIntArrayRef shape,
                    const at::Tensor& query) {
  if (!rounding.defined()) return;
  if (rounding.dim() == 1 || !is_half(query)) {
    check_shape(argument, rounding, std::array<c10::SymInt, 1>{0});
  } else {
    check_shape(argument, rounding, shape);
  }
  TORCH_CHECK_TYPE(rounding.scalar_type() == at::kBFloat16, argument, " be bfloat16, got ", rounding.scalar_type());
  check_device(argument, rounding, query);
}

// Of lse and its gradient: float64 for float64, float32 for everything else.
void check_lse_kind(const Argument& argument, const at::Tensor& lse, const at::Tensor& query) {
  const at::ScalarType dtype = query.scalar_type() == at::kDouble ? at::kDouble : at::kFloat;
  TORCH_CHECK_TYPE(lse.scalar_type() == dtype, argument, " be ", dtype, ", got ", lse.scalar_type());
  check_device(argument, lse, query);
}

void check_lse(const char* function, const AttentionArguments& a, const at::Tensor& lse) {
  const std::array<c10::SymInt, 3> shape{a.query.sym_size(0), a.query.sym_size(1), a.query.sym_size(2)};
  check_shape({function, "lse"}, lse, shape);
  check_lse_kind({function, "lse"}, lse, a.query);
}

void check_mask_gradient(const Argument& argument, const at::Tensor& mask, bool wanted) {
  TORCH_CHECK_VALUE(!wanted || (mask.defined() && mask.scalar_type() != at::kBool), argument,
                    " be floating point for its gradient to be asked for, got ", mask.defined() ? "bool" : "none");
}

void check_is_given(const Argument& argument, const at::Tensor& tensor, bool wanted) {
  TORCH_CHECK_VALUE(!wanted || tensor.defined(), argument, " be given for its gradient to be asked for, got none");
}

void check_layer_inputs(const char* function, const LayerArguments& a) {
  const Argument query{function, "query"};
  const char* shape = a.batch_first ? "(batch, length, embed_dim)" : "(length, batch, embed_dim)";
  const int64_t batch_dim = a.batch_first ? 0 : 1;
  check_rank(query, a.query, 3, shape);
  check_float(query, a.query);
  const auto check_input = [&](const char* name, const at::Tensor& tensor) {
    check_rank({function, name}, tensor, 3, shape);
    check_same_kind({function, name}, tensor, a.query);
    check_size({function, name}, tensor, batch_dim, a.query.sym_size(batch_dim), "query's batch size");
    check_size({function, name}, tensor, 2, a.query.sym_size(2), "query's embed_dim");
  };
  check_input("key", a.key);
  check_input("value", a.value);
  check_size({function, "value"}, a.value, 1 - batch_dim, a.key.sym_size(1 - batch_dim), "key's length");
  TORCH_CHECK_VALUE(a.shared_inputs >= kSeparateInputs && a.shared_inputs <= kSharedAll, function,
                    ": shared_inputs must be 0 (none), 1 (key and value) or 2 (all), got ", a.shared_inputs);
  if (a.shared_inputs != kSharedAll) return;
  check_size({function, "key"}, a.key, 1 - batch_dim, a.query.sym_size(1 - batch_dim),
             "query's length, when shared_inputs is 2,");
}

void check_layer_parameters(const char* function, const LayerArguments& a) {
  const Argument in_weight{function, "in_proj_weight"};
  const Argument out_weight{function, "out_proj_weight"};
  check_rank(in_weight, a.in_proj_weight, 2, "((num_heads + 2 num_kv_heads) * head_dim, embed_dim)");
  check_same_kind(in_weight, a.in_proj_weight, a.query);
  check_size(in_weight, a.in_proj_weight, 1, a.query.sym_size(2), "query's embed_dim");
  const c10::SymInt rows = a.in_proj_weight.sym_size(0);
  TORCH_CHECK_VALUE(rows >= a.num_heads, in_weight, " have at least num_heads = ", a.num_heads, " rows (size 0), got ",
                    rows);
  const int64_t heads = a.num_heads + 2 * a.num_kv_heads;
  TORCH_CHECK_VALUE(rows % heads == 0 && rows >= heads, in_weight,
                    " have a multiple of num_heads + 2 num_kv_heads = ", heads, " rows (size 0), got ", rows);
  check_rank(out_weight, a.out_proj_weight, 2, "(embed_dim, num_heads * head_dim)");
  check_same_kind(out_weight, a.out_proj_weight, a.query);
  check_size(out_weight, a.out_proj_weight, 1, rows / heads * a.num_heads, "num_heads * head_dim =");
  const auto check_bias = [&](const char* name, const at::Tensor& bias, const at::Tensor& weight) {
    if (!bias.defined()) return;
    check_rank({function, name}, bias, 1, "(its weight's rows)");
    check_same_kind({function, name}, bias, a.query);
    check_size({function, name}, bias, 0, weight.sym_size(0), "its weight's number of rows");
  };
  check_bias("in_proj_bias", a.in_proj_bias, a.in_proj_weight);
  check_bias("out_proj_bias", a.out_proj_bias, a.out_proj_weight);
}

// What the forward saved: one buffer for each product, the others empty.
void check_projections(const char* function, const LayerArguments& a, const LayerState& s) {
  const c10::SymInt head_dim = a.in_proj_weight.sym_size(0) / (a.num_heads + 2 * a.num_kv_heads);
  const int64_t h = a.num_heads, g = a.num_kv_heads;
  const auto check_buffer = [&](const char* name, const at::Tensor& buffer, const at::Tensor& input, int64_t heads) {
    check_same_kind({function, name}, buffer, a.query);
    if (heads == 0) return check_shape({function, name}, buffer, std::array<c10::SymInt, 1>{0});
    const std::array<c10::SymInt, 3> shape{input.sym_size(0), input.sym_size(1), heads * head_dim};
    check_shape({function, name}, buffer, shape);
  };
  const bool all = a.shared_inputs == kSharedAll, key_value = a.shared_inputs == kSharedKeyValue;
  check_buffer("q", s.q, a.query, all ? h + 2 * g : h);
  check_buffer("k", s.k, a.key, all ? 0 : key_value ? 2 * g : g);
  check_buffer("v", s.v, a.value, all || key_value ? 0 : g);
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
  check_dropout_seed(function, a.dropout_seed, a.dropout_p, a.query);
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
  check_lse(function, a, c.lse);
  const std::array<c10::SymInt, 4> shape{a.query.sym_size(0), a.query.sym_size(1), a.query.sym_size(2),
                                         a.value.sym_size(3)};
  check_shape({function, "out"}, c.out, shape);
  check_same_kind({function, "out"}, c.out, a.query);
  if (c.grad_out.defined()) {
    check_shape({function, "grad_out"}, c.grad_out, shape);
    check_same_kind({function, "grad_out"}, c.grad_out, a.query);
  }
  check_rounding({function, "rounding"}, c.rounding, shape, a.query);
  if (c.grad_lse.defined()) {
    check_shape({function, "grad_lse"}, c.grad_lse, c.lse.sym_sizes());
    check_lse_kind({function, "grad_lse"}, c.grad_lse, a.query);
  }
  check_mask_gradient({function, "attn_mask"}, a.attn_mask, c.output_mask[3]);
  check_mask_gradient({function, "key_padding_mask"}, a.key_padding_mask, c.output_mask[4]);
  check_is_given({function, "relative_bias"}, a.variants.relative_bias, c.output_mask[5]);
  check_is_given({function, "sink"}, a.variants.sink, c.output_mask[6]);
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

void check_layer(const LayerArguments& a) {
  const char* function = "multi_head_attention";
  TORCH_CHECK_VALUE(a.num_kv_heads >= 1 && a.num_heads >= 1 && a.num_heads % a.num_kv_heads == 0, function,
                    ": num_kv_heads must divide num_heads ", a.num_heads, ", got ", a.num_kv_heads);
  check_layer_inputs(function, a);
  check_layer_parameters(function, a);
  check_numbers(function, a.dropout_p, a.causal, a.scale);
  check_dropout_seed(function, a.dropout_seed, a.dropout_p, a.query);
  const int64_t batch_dim = a.batch_first ? 0 : 1;
  const PairSizes sizes{a.query.sym_size(batch_dim), a.num_heads, a.query.sym_size(1 - batch_dim),
                        a.key.sym_size(1 - batch_dim)};
  check_masks(function, a.attn_mask, a.key_padding_mask, sizes, a.query);
}

void check_layer_backward(const LayerArguments& a, const LayerCotangents& c) {
  check_layer(a);
  const char* function = "multi_head_attention_backward";
  const c10::SymInt first = a.query.sym_size(0);
  const c10::SymInt second = a.query.sym_size(1);
  const std::array<c10::SymInt, 3> out{first, second, a.out_proj_weight.sym_size(0)};
  const std::array<c10::SymInt, 3> context{first, second, a.out_proj_weight.sym_size(1)};
  const std::array<c10::SymInt, 3> lse{a.batch_first ? first : second, a.num_heads, a.batch_first ? second : first};
  check_shape({function, "grad_out"}, c.grad_out, out);
  check_same_kind({function, "grad_out"}, c.grad_out, a.query);
  check_shape({function, "context"}, c.state.context, context);
  check_same_kind({function, "context"}, c.state.context, a.query);
  check_rounding({function, "rounding"}, c.state.rounding, context, a.query);
  check_shape({function, "lse"}, c.state.lse, lse);
  check_lse_kind({function, "lse"}, c.state.lse, a.query);
  check_projections(function, a, c.state);
  check_is_given({function, "in_proj_bias"}, a.in_proj_bias, c.output_mask[4]);
  check_is_given({function, "out_proj_bias"}, a.out_proj_bias, c.output_mask[6]);
  check_mask_gradient({function, "attn_mask"}, a.attn_mask, c.output_mask[7]);
  check_mask_gradient({function, "key_padding_mask"}, a.key_padding_mask, c.output_mask[8]);
}

}  // namespace mha_ext
