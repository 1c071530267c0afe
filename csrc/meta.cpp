// Shapes, dtypes and strides of every result, for tracing: nothing is computed and sizes may be symbolic.
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_strided.h>
#include <torch/library.h>

#include "checks.h"
#include "layer.h"
#include "layout.h"
#include "signatures.h"

namespace mha_ext {
namespace {

at::Tensor empty(c10::SymIntArrayRef sizes, const at::Tensor& like) { return at::empty_symint(sizes, like.options()); }

// Gradients of query, key and value lie as (B, T, H, D). Made at once: views of symbolic sizes need Python's
// dispatcher.
at::Tensor gradient_like(bool wanted, const at::Tensor& tensor) {
  if (!wanted) return {};
  const c10::SymInt heads = tensor.sym_size(1).max(1), length = tensor.sym_size(2).max(1), width = tensor.sym_size(3);
  const std::array<c10::SymInt, 4> strides{length * heads * width, width, heads * width, 1};
  return at::empty_strided_symint(tensor.sym_sizes(), strides, tensor.options());
}

at::Tensor contiguous_like(bool wanted, const at::Tensor& tensor) {
  return wanted ? empty(tensor.sym_sizes(), tensor) : at::Tensor();
}

at::TensorOptions lse_options(const at::Tensor& query) {
  return query.options().dtype(query.scalar_type() == at::kDouble ? at::kDouble : at::kFloat);
}

AttentionResult attention_results(const AttentionArguments& a) {
  const at::Tensor& q = a.query;
  return {empty_like_query(q, a.value.sym_size(3)),
          at::empty_symint({q.sym_size(0), q.sym_size(1), q.sym_size(2)}, lse_options(q))};
}

AttentionResult attention_meta(const AttentionArguments& a) {
  check_attention("attention", a);
  return attention_results(a);
}

AttentionResult paged_attention_meta(const PagedArguments& a) {
  check_paged_attention(a);
  return attention_results({a.query, a.key_pages, a.value_pages, {}, {}, {}});
}

template <size_t kNumWanted>
AttentionGradients gradients_like(const std::array<bool, kNumWanted>& wanted, const AttentionArguments& a) {
  return {gradient_like(wanted[0], a.query),
          gradient_like(wanted[1], a.key),
          gradient_like(wanted[2], a.value),
          contiguous_like(wanted[3], a.attn_mask),
          contiguous_like(wanted[4], a.key_padding_mask),
          contiguous_like(wanted[5], a.variants.relative_bias),
          contiguous_like(wanted[6], a.variants.sink)};
}

AttentionGradients attention_backward_meta(const AttentionArguments& a, const AttentionCotangents& c) {
  check_attention_backward(a, c);
  return gradients_like(c.output_mask, a);
}

AttentionResult attention_jvp_meta(const AttentionArguments& a, const ForwardTangents& t) {
  check_attention_jvp(a, t);
  return attention_results(a);
}

SecondGradients attention_backward_jvp_meta(const AttentionArguments& a, const BackwardTangents& t) {
  check_attention_backward_jvp(a, t);
  const auto& wanted = t.output_mask;
  const auto [out, lse] = attention_results(a);
  const at::Tensor none;
  return std::tuple_cat(gradients_like(wanted, a), AttentionResult(wanted[7] ? out : none, wanted[8] ? lse : none));
}

WeightsResult attention_with_weights_meta(const AttentionArguments& a, bool average) {
  check_attention("attention_with_weights", a);
  const at::Tensor& q = a.query;
  const auto [out, lse] = attention_results(a);
  if (average) return {out, lse, empty({q.sym_size(0), q.sym_size(2), a.key.sym_size(2)}, q)};
  return {out, lse, empty({q.sym_size(0), q.sym_size(1), q.sym_size(2), a.key.sym_size(2)}, q)};
}

ForBackwardResult attention_for_backward_meta(const AttentionArguments& a, int64_t weights) {
  check_attention_for_backward(a, weights);
  const at::Tensor rounding = empty_rounding(a.query, a.value.sym_size(3));
  if (weights != kNoWeights) {
    return std::tuple_cat(attention_with_weights_meta(a, weights == kMeanWeights), std::tuple(rounding));
  }
  return std::tuple_cat(attention_results(a), std::tuple(empty({0}, a.query), rounding));
}

WeightsGradients attention_weights_backward_meta(const AttentionArguments& a, const WeightsCotangents& c) {
  check_attention_weights_backward(a, c);
  return {gradient_like(c.output_mask[0], a.query),
          gradient_like(c.output_mask[1], a.key),
          contiguous_like(c.output_mask[2], a.attn_mask),
          contiguous_like(c.output_mask[3], a.key_padding_mask),
          contiguous_like(c.output_mask[4], a.variants.relative_bias),
          contiguous_like(c.output_mask[5], a.variants.sink)};
}

LayerResult multi_head_attention_meta(const LayerArguments& a) {
  check_layer(a);
  const c10::SymInt head_dim = a.in_proj_weight.sym_size(0) / (a.num_heads + 2 * a.num_kv_heads);
  const c10::SymInt query_width = head_dim * a.num_heads;
  const c10::SymInt kv_width = head_dim * a.num_kv_heads;
  const auto rows_of = [](const at::Tensor& input, const c10::SymInt& width) {
    return empty({input.sym_size(0), input.sym_size(1), width}, input);
  };
  const at::Tensor none = empty({0}, a.query);
  const at::Tensor context = rows_of(a.query, query_width);
  const at::Tensor out = rows_of(a.query, a.out_proj_weight.sym_size(0));
  const c10::SymInt batch = a.query.sym_size(a.batch_first ? 0 : 1);
  const c10::SymInt length = a.query.sym_size(a.batch_first ? 1 : 0);
  const at::Tensor lse = at::empty_symint({batch, a.num_heads, length}, lse_options(a.query));
  const bool keeps = layer::keeps_rounding(a);
  const at::TensorOptions bfloat16 = a.query.options().dtype(at::kBFloat16);
  const at::Tensor rounding = keeps ? at::empty_symint(context.sym_sizes(), bfloat16) : at::empty({0}, bfloat16);
  switch (a.shared_inputs) {
    case kSharedAll:
      return {out, rows_of(a.query, query_width + 2 * kv_width), none, empty({0}, a.query), context, lse, rounding};
    case kSharedKeyValue:
      return {out, rows_of(a.query, query_width), rows_of(a.key, 2 * kv_width), none, context, lse, rounding};
    default:
      return {
          out,     rows_of(a.query, query_width), rows_of(a.key, kv_width), rows_of(a.value, kv_width), context, lse,
          rounding};
  }
}

LayerGradients multi_head_attention_backward_meta(const LayerArguments& a, const LayerCotangents& c) {
  check_layer_backward(a, c);
  const auto& wanted = c.output_mask;
  return {contiguous_like(wanted[0], a.query),
          contiguous_like(wanted[1] && a.shared_inputs != kSharedAll, a.key),
          contiguous_like(wanted[2] && a.shared_inputs == kSeparateInputs, a.value),
          contiguous_like(wanted[3], a.in_proj_weight),
          contiguous_like(wanted[4], a.in_proj_bias),
          contiguous_like(wanted[5], a.out_proj_weight),
          contiguous_like(wanted[6], a.out_proj_bias),
          contiguous_like(wanted[7], a.attn_mask),
          contiguous_like(wanted[8], a.key_padding_mask)};
}

}  // namespace

TORCH_LIBRARY_IMPL(mha_ext, Meta, m) {
  m.impl("attention", TORCH_FN(attention_kernel<attention_meta>));
  m.impl("attention_for_backward", TORCH_FN(attention_for_backward_kernel<attention_for_backward_meta>));
  m.impl("attention_backward", TORCH_FN(attention_backward_kernel<attention_backward_meta>));
  m.impl("attention_jvp", TORCH_FN(attention_jvp_kernel<attention_jvp_meta>));
  m.impl("attention_backward_jvp", TORCH_FN(attention_backward_jvp_kernel<attention_backward_jvp_meta>));
  m.impl("paged_attention", TORCH_FN(paged_attention_kernel<paged_attention_meta>));
  m.impl("attention_with_weights", TORCH_FN(attention_with_weights_kernel<attention_with_weights_meta>));
  m.impl("attention_weights_backward", TORCH_FN(attention_weights_backward_kernel<attention_weights_backward_meta>));
  m.impl("multi_head_attention", TORCH_FN(multi_head_attention_kernel<multi_head_attention_meta>));
  m.impl("multi_head_attention_backward",
         TORCH_FN(multi_head_attention_backward_kernel<multi_head_attention_backward_meta>));
}

}  // namespace mha_ext
