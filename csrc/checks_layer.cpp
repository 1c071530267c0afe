// The contract of the layer operator and of its backward.
#include <c10/util/Exception.h>

#include "argument_checks.h"
#include "checks.h"

namespace mha_ext {
namespace {

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

void check_layer(const LayerArguments& a) {
  const char* function = "multi_head_attention";
  TORCH_CHECK_VALUE(a.num_kv_heads >= 1 && a.num_heads >= 1 && a.num_heads % a.num_kv_heads == 0, function,
                    ": num_kv_heads must divide num_heads ", a.num_heads, ", got ", a.num_kv_heads);
  check_layer_inputs(function, a);
  check_layer_parameters(function, a);
  check_numbers(function, a.dropout_p, a.causal, a.scale);
  const int64_t batch_dim = a.batch_first ? 0 : 1;
  check_dropout_seed(function, a.dropout_seed, a.dropout_p, a.query.sym_size(batch_dim), a.query);
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
