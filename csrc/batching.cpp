// vmap: attention with vmap's axis folded into the batch (folding.h); the layer as its linear maps, which have rules of
// their own, around that.
#include <ATen/TensorOperators.h>
#include <ATen/ops/arange.h>
#include <torch/library.h>

#include "autocast.h"
#include "composite.h"
#include "folding.h"
#include "saved_arguments.h"
#include "signatures.h"

namespace mha_ext {
namespace {

constexpr std::array<bool, kNumGradients> kNone{};

// Everything in a call that vmap may vary.
std::vector<at::Tensor> tensors_of(const AttentionArguments& a, std::initializer_list<at::Tensor> others = {}) {
  const auto inputs = differentiable(a);
  std::vector<at::Tensor> tensors(inputs.begin(), inputs.end());
  tensors.insert(tensors.end(), {a.dropout_seed, a.variants.key_range});
  tensors.insert(tensors.end(), others.begin(), others.end());
  return tensors;
}

// Empty ones, with one axis, say that there is none.
at::Tensor fold_rounding(const Folding& folding, const at::Tensor& rounding) {
  return rounding.defined() && rounding.dim() > 1 ? folding.rows(rounding) : folding.unwrap(rounding);
}

at::Tensor unfold_if_any(const Folding& folding, const at::Tensor& result, const c10::SymInt& samples) {
  return result.dim() > 1 ? folding.unfold(result, samples) : result;
}

AttentionResult attention_batched(const AttentionArguments& a) {
  if (autocast_is_active(a.query)) return attention_autocast(a);
  const Folding folding(tensors_of(a));
  const c10::SymInt samples = a.query.sym_size(0);
  const auto [out, lse] = call_attention(folding.arguments(a, kNone));
  return {folding.unfold(out, samples), folding.unfold(lse, samples)};
}

WeightsResult attention_with_weights_batched(const AttentionArguments& a, bool average) {
  if (autocast_is_active(a.query)) return attention_with_weights_autocast(a, average);
  const Folding folding(tensors_of(a));
  const c10::SymInt samples = a.query.sym_size(0);
  const auto [out, lse, weights] = call_attention_with_weights(folding.arguments(a, kNone), average);
  return {folding.unfold(out, samples), folding.unfold(lse, samples), folding.unfold(weights, samples)};
}

ForBackwardResult attention_for_backward_batched(const AttentionArguments& a, int64_t kind) {
  const Folding folding(tensors_of(a));
  const c10::SymInt samples = a.query.sym_size(0);
  const auto [out, lse, weights, rounding] = call_attention_for_backward(folding.arguments(a, kNone), kind);
  return {folding.unfold(out, samples), folding.unfold(lse, samples), unfold_if_any(folding, weights, samples),
          unfold_if_any(folding, rounding, samples)};
}

AttentionCotangents fold_cotangents(const Folding& folding, const AttentionCotangents& c) {
  return {folding.rows(c.grad_out),
          folding.rows(c.grad_lse),
          folding.rows(c.out),
          folding.rows(c.lse),
          c.output_mask,
          fold_rounding(folding, c.rounding)};
}

AttentionGradients attention_backward_batched(const AttentionArguments& a, const AttentionCotangents& c) {
  const Folding folding(tensors_of(a, {c.grad_out, c.grad_lse, c.out, c.lse, c.rounding}));
  const c10::SymInt samples = a.query.sym_size(0);
  const auto [query, key, value, mask, padding, bias, sink] =
      call_attention_backward(folding.arguments(a, c.output_mask), fold_cotangents(folding, c));
  return {folding.unfold(query, samples),
          folding.unfold(key, samples),
          folding.unfold(value, samples),
          folding.unfold_mask(mask, samples, a.attn_mask),
          folding.unfold_mask(padding, samples, a.key_padding_mask),
          folding.unfold_mask(bias, samples, a.variants.relative_bias),
          folding.unfold_sink(sink, samples, a.variants.sink)};
}

// In which float masks must have the shape of their tangents.
Tangents fold_tangents(const Folding& folding, const Tangents& t, const c10::SymInt& samples) {
  return {folding.rows(t[0]),
          folding.rows(t[1]),
          folding.rows(t[2]),
          folding.mask(t[3], samples, true),
          folding.mask(t[4], samples, true),
          folding.mask(t[5], samples, true),
          folding.sink(t[6], samples, true)};
}

std::array<bool, kNumGradients> given(const Tangents& tangents) {
  std::array<bool, kNumGradients> flags{};
  std::transform(tangents.begin(), tangents.end(), flags.begin(), [](const at::Tensor& t) { return t.defined(); });
  return flags;
}

AttentionResult attention_jvp_batched(const AttentionArguments& a, const ForwardTangents& t) {
  std::vector<at::Tensor> tensors = tensors_of(a, {t.out, t.lse, t.rounding});
  tensors.insert(tensors.end(), t.inputs.begin(), t.inputs.end());
  const Folding folding(tensors);
  const c10::SymInt samples = a.query.sym_size(0);
  const auto [out, lse] =
      call_attention_jvp(folding.arguments(a, given(t.inputs)),
                         {folding.rows(t.out), folding.rows(t.lse), fold_tangents(folding, t.inputs, samples),
                          fold_rounding(folding, t.rounding)});
  return {folding.unfold(out, samples), folding.unfold(lse, samples)};
}

SecondGradients attention_backward_jvp_batched(const AttentionArguments& a, const BackwardTangents& t) {
  const AttentionCotangents& c = t.cotangents;
  std::vector<at::Tensor> tensors =
      tensors_of(a, {c.grad_out, c.grad_lse, c.out, c.lse, c.rounding, t.grad_out, t.grad_lse});
  tensors.insert(tensors.end(), t.inputs.begin(), t.inputs.end());
  const Folding folding(tensors);
  const c10::SymInt samples = a.query.sym_size(0);
  std::array<bool, kNumGradients> own = given(t.inputs);
  for (size_t i = 0; i < kNumGradients; ++i) own[i] = own[i] || t.output_mask[i];
  BackwardTangents folded{fold_cotangents(folding, c), fold_tangents(folding, t.inputs, samples),
                          folding.rows(t.grad_out), folding.rows(t.grad_lse), t.output_mask};
  const auto [query, key, value, mask, padding, bias, sink, out, lse] =
      call_attention_backward_jvp(folding.arguments(a, own), folded);
  return {folding.unfold(query, samples),
          folding.unfold(key, samples),
          folding.unfold(value, samples),
          folding.unfold_mask(mask, samples, a.attn_mask),
          folding.unfold_mask(padding, samples, a.key_padding_mask),
          folding.unfold_mask(bias, samples, a.variants.relative_bias),
          folding.unfold_sink(sink, samples, a.variants.sink),
          folding.unfold(out, samples),
          folding.unfold(lse, samples)};
}

WeightsGradients attention_weights_backward_batched(const AttentionArguments& a, const WeightsCotangents& c) {
  const Folding folding(tensors_of(a, {c.grad_weights, c.lse}));
  const c10::SymInt samples = a.query.sym_size(0);
  const auto& wanted = c.output_mask;
  const auto [query, key, mask, padding, bias, sink] = call_attention_weights_backward(
      folding.arguments(a, {wanted[0], wanted[1], false, wanted[2], wanted[3], wanted[4], wanted[5]}),
      {folding.rows(c.grad_weights), folding.rows(c.lse), c.average, wanted});
  return {folding.unfold(query, samples),
          folding.unfold(key, samples),
          folding.unfold_mask(mask, samples, a.attn_mask),
          folding.unfold_mask(padding, samples, a.key_padding_mask),
          folding.unfold_mask(bias, samples, a.variants.relative_bias),
          folding.unfold_sink(sink, samples, a.variants.sink)};
}

// Each of the N has pages of its own then: they lie one behind the other.
AttentionResult paged_attention_batched(const PagedArguments& a) {
  const c10::SymInt samples = a.query.sym_size(0), pages = a.key_pages.sym_size(0);
  const std::array<at::Tensor, 6> tensors{a.query, a.key_pages, a.value_pages, a.page_table, a.key_range, a.sink};
  const Folding folding(tensors);
  const bool own_pages = folding.varies(a.key_pages) || folding.varies(a.value_pages);
  PagedArguments folded = a;
  folded.query = folding.rows(a.query);
  folded.key_pages = own_pages ? folding.rows(a.key_pages) : folding.unwrap(a.key_pages);
  folded.value_pages = own_pages ? folding.rows(a.value_pages) : folding.unwrap(a.value_pages);
  folded.page_table = folding.rows(a.page_table);
  if (own_pages) {
    const at::Tensor first = at::arange(folding.count(), folded.page_table.options()) * at::Scalar(pages);
    folded.page_table = folded.page_table + first.repeat_interleave_symint(samples).unsqueeze(-1);
  }
  folded.key_range = folding.ranges(a.key_range, samples);
  folded.sink = folding.sink(a.sink, samples, false);
  const auto [out, lse] = call_paged_attention(folded);
  return {folding.unfold(out, samples), folding.unfold(lse, samples)};
}

LayerResult multi_head_attention_batched(const LayerArguments& a) {
  return autocast_is_active(a.query) ? multi_head_attention_autocast(a) : multi_head_attention_differentiable(a);
}

}  // namespace

TORCH_LIBRARY_IMPL(mha_ext, FuncTorchBatched, m) {
  m.impl("attention", TORCH_FN(attention_kernel<attention_batched>));
  m.impl("attention_backward", TORCH_FN(attention_backward_kernel<attention_backward_batched>));
  m.impl("attention_jvp", TORCH_FN(attention_jvp_kernel<attention_jvp_batched>));
  m.impl("attention_backward_jvp", TORCH_FN(attention_backward_jvp_kernel<attention_backward_jvp_batched>));
  m.impl("attention_with_weights", TORCH_FN(attention_with_weights_kernel<attention_with_weights_batched>));
  m.impl("attention_for_backward", TORCH_FN(attention_for_backward_kernel<attention_for_backward_batched>));
  m.impl("attention_weights_backward", TORCH_FN(attention_weights_backward_kernel<attention_weights_backward_batched>));
  m.impl("paged_attention", TORCH_FN(paged_attention_kernel<paged_attention_batched>));
  m.impl("multi_head_attention", TORCH_FN(multi_head_attention_kernel<multi_head_attention_batched>));
  m.impl("multi_head_attention_backward",
         TORCH_FN(multi_head_attention_backward_kernel<multi_head_attention_backward_from_inputs>));
}

}  // namespace mha_ext
