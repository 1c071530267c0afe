// multi_head_attention on CPU. The same steps as the composition in csrc/multi_head_attention.cpp, without what a small
// layer would spend its time on: views made through the dispatcher, and a product laid out for many rows.
#include <ATen/ops/addmm_cpu_dispatch.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/linear.h>
#include <torch/library.h>

#include "../checks.h"
#include "../layer.h"
#include "../signatures.h"
#include "arguments.h"
#include "forward_into.h"
#include "layer_with_weights.h"
#include "parallel.h"
#include "products.h"

namespace mha_ext::cpu {
namespace {

using layer::HeadRows;

int64_t total_heads(const LayerArguments& a) { return a.num_heads + 2 * a.num_kv_heads; }

// `packed` is in_proj_weight or in_proj_bias.
OptionalTensor rows_of(const LayerArguments& a, const at::Tensor& packed, const HeadRows& rows) {
  if (!packed.defined()) return std::nullopt;
  if (rows.count == total_heads(a)) return packed;
  const int64_t head_dim = packed.size(0) / total_heads(a);
  c10::DimVector sizes(packed.sizes());
  sizes[0] = rows.count * head_dim;
  return at::native::as_strided_tensorimpl(packed, sizes, packed.strides(),
                                           packed.storage_offset() + rows.first * head_dim * packed.stride(0));
}

// Heads [first, first + count) of a contiguous (B, T, n * D) or (T, B, n * D) buffer as (B, count, T, D).
at::Tensor heads_of(const LayerArguments& a, const at::Tensor& buffer, const HeadRows& rows) {
  const int64_t head_dim = a.in_proj_weight.size(0) / total_heads(a), width = buffer.size(2);
  const int64_t outer = buffer.size(1) * width;
  const int64_t batch = buffer.size(a.batch_first ? 0 : 1), length = buffer.size(a.batch_first ? 1 : 0);
  return at::native::as_strided_tensorimpl(buffer, {batch, rows.count, length, head_dim},
                                           {a.batch_first ? outer : width, head_dim, a.batch_first ? width : outer, 1},
                                           rows.first * head_dim);
}

// at::linear of (B, T, E), without its views.
at::Tensor linear_map(const at::Tensor& input, const at::Tensor& weight, const OptionalTensor& bias) {
  if (has_fast_linear(input, weight, bias)) return fast_linear(input, weight, bias);
  if (!input.is_contiguous() || !bias.has_value()) return at::linear(input, weight, bias);
  const int64_t width = input.size(2);
  const at::Tensor rows = at::native::as_strided_tensorimpl(input, {input.size(0) * input.size(1), width}, {width, 1});
  const at::Tensor turned =
      at::native::as_strided_tensorimpl(weight, {width, weight.size(0)}, {weight.stride(1), weight.stride(0)});
  const at::Tensor out = at::cpu::addmm(*bias, rows, turned);
  out.unsafeGetTensorImpl()->set_sizes_contiguous({input.size(0), input.size(1), weight.size(0)});
  return out;
}

// The projections, with empty buffers where one serves several inputs; the rest of the state is left out.
LayerState projected(const LayerArguments& a) {
  LayerState s;
  const std::array<at::Tensor*, 3> buffers{&s.q, &s.k, &s.v};
  size_t used = 0;
  for (const layer::Projection& product : layer::projections(a)) {
    *buffers[used++] = linear_map(*product.input, *rows_of(a, a.in_proj_weight, product.rows),
                                  rows_of(a, a.in_proj_bias, product.rows));
  }
  while (used < buffers.size()) *buffers[used++] = at::empty({0}, a.query.options());
  return s;
}

AttentionArguments attention_arguments(const LayerArguments& a, const LayerState& s) {
  const int64_t h = a.num_heads, g = a.num_kv_heads;
  const bool all = a.shared_inputs == kSharedAll, separate = a.shared_inputs == kSeparateInputs;
  const at::Tensor& keys = all ? s.q : s.k;
  const int64_t first_key = all ? h : 0;
  return {heads_of(a, s.q, {0, h}),
          heads_of(a, keys, {first_key, g}),
          separate ? heads_of(a, s.v, {0, g}) : heads_of(a, keys, {first_key + g, g}),
          a.attn_mask,
          a.key_padding_mask,
          a.dropout_seed,
          a.dropout_p,
          a.causal,
          a.scale};
}

at::Tensor empty_context(const LayerArguments& a) {
  return at::empty({a.query.size(0), a.query.size(1), a.out_proj_weight.size(1)}, a.query.options());
}

LayerResult multi_head_attention(const LayerArguments& a) {
  check_layer(a);
  LayerState s = projected(a);
  s.context = empty_context(a);
  const layer::HeadRows heads{0, a.num_heads};
  const at::TensorOptions bfloat16 = a.query.options().dtype(at::kBFloat16);
  const bool keeps = layer::keeps_rounding(a);
  s.rounding = keeps ? at::empty(s.context.sizes(), bfloat16) : at::empty({0}, bfloat16);
  s.lse = attention_into(attention_arguments(a, s),
                         {heads_of(a, s.context, heads), keeps ? heads_of(a, s.rounding, heads) : at::Tensor()});
  const at::Tensor out = linear_map(s.context, a.out_proj_weight, to_optional(a.out_proj_bias));
  return {out, s.q, s.k, s.v, s.context, s.lse, s.rounding};
}

}  // namespace

AttentionResult layer_with_weights(const LayerArguments& a, bool average) {
  const LayerState s = projected(a);
  const at::Tensor context = empty_context(a);
  const at::Tensor weights = std::get<1>(
      attention_with_weights_into(attention_arguments(a, s), average, {heads_of(a, context, {0, a.num_heads})}));
  return {linear_map(context, a.out_proj_weight, to_optional(a.out_proj_bias)), weights};
}

TORCH_LIBRARY_IMPL(mha_ext, CPU, m) {
  m.impl("multi_head_attention", TORCH_FN(multi_head_attention_kernel<multi_head_attention>));
}

}  // namespace mha_ext::cpu
