#include "composite.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/empty.h>
#include <torch/library.h>

#include <limits>

#include "checks.h"
#include "layout.h"
#include "problem.h"
#include "signatures.h"

namespace mha_ext {
namespace {

using pairs::Operand;
using pairs::Problem;

at::Tensor finish_output(const at::Tensor& out, const at::Tensor& query) {
  return lay_out_like_query(out.to(query.scalar_type()), query);
}

at::Tensor finish_weights(const at::Tensor& weights, const at::Tensor& query, bool average) {
  return (average ? weights.mean(1) : weights).to(query.scalar_type()).contiguous();
}

at::Tensor rounding_of(const at::Tensor& out, const at::Tensor& query) {
  if (!is_half(query)) return at::empty({0}, query.options().dtype(at::kBFloat16));
  const double largest = query.scalar_type() == at::kHalf ? std::numeric_limits<at::Half>::max()
                                                          : std::numeric_limits<at::BFloat16>::max();
  const at::Tensor lost = out - out.to(query.scalar_type()).to(out.scalar_type()).clamp(-largest, largest);
  return lay_out_like_query(lost.to(at::kBFloat16), query);
}

}  // namespace

AttentionResult attention_math(const AttentionArguments& a) {
  check_attention("attention", a);
  const c10::impl::ExcludeDispatchKeyGuard no_autocast(c10::autocast_dispatch_keyset);
  const Problem p = pairs::make_problem(a);
  const at::Tensor out = pairs::attend(a, p, pairs::dropped(p.softmax.probabilities, p), p.value);
  return {finish_output(out, a.query), p.softmax.lse.contiguous()};
}

WeightsResult attention_with_weights_math(const AttentionArguments& a, bool average) {
  check_attention("attention_with_weights", a);
  const c10::impl::ExcludeDispatchKeyGuard no_autocast(c10::autocast_dispatch_keyset);
  const Problem p = pairs::make_problem(a);
  const at::Tensor used = pairs::dropped(p.softmax.probabilities, p);
  return {finish_output(pairs::attend(a, p, used, p.value), a.query), p.softmax.lse.contiguous(),
          finish_weights(used, a.query, average)};
}

ForBackwardResult attention_for_backward_math(const AttentionArguments& a, int64_t weights) {
  check_attention_for_backward(a, weights);
  const c10::impl::ExcludeDispatchKeyGuard no_autocast(c10::autocast_dispatch_keyset);
  const Problem p = pairs::make_problem(a);
  const at::Tensor used = pairs::dropped(p.softmax.probabilities, p), out = pairs::attend(a, p, used, p.value);
  return {finish_output(out, a.query), p.softmax.lse.contiguous(),
          weights == kNoWeights ? at::empty({0}, a.query.options())
                                : finish_weights(used, a.query, weights == kMeanWeights),
          rounding_of(out, a.query)};
}

AttentionResult paged_attention_math(const PagedArguments& a) {
  check_paged_attention(a);
  const auto& table = a.page_table;
  return attention_math(on_keys(a, gather_pages(a.key_pages, table), gather_pages(a.value_pages, table)));
}

AttentionGradients attention_backward_math(const AttentionArguments& a, const AttentionCotangents& c) {
  check_attention_backward(a, c);
  const c10::impl::ExcludeDispatchKeyGuard no_autocast(c10::autocast_dispatch_keyset);
  const Problem p = pairs::make_problem(a);
  at::Tensor grad_weights, grad_value;
  if (c.grad_out.defined()) {
    const Operand grad_out = pairs::make_operand(c.grad_out.to(pairs::compute_dtype(a.query)), p.hidden);
    grad_weights = pairs::pair_product(grad_out, p.value);
    const at::Tensor used = pairs::dropped(p.softmax.probabilities, p);
    if (c.output_mask[2]) grad_value = pairs::value_gradient(a, p, used, grad_out);
  } else if (c.output_mask[2]) {
    grad_value = p.value.values * 0;
  }
  const auto& wanted = c.output_mask;
  const pairs::ScoreGradient grad = pairs::score_gradient(p, grad_weights, c.grad_lse);
  const pairs::MaskGradients g = pairs::mask_gradients(a, grad.scores, {wanted[3], wanted[4], wanted[5]});
  const at::Tensor grad_products = pairs::uncapped_gradient(p, grad.scores);
  at::Tensor grad_query, grad_key;
  if (wanted[0]) grad_query = pairs::query_gradient(a, grad_products, p.key.values) * pairs::scale_of(a);
  if (wanted[1]) grad_key = pairs::key_gradient(a, grad_products, p.query.values);
  const at::Tensor grad_sink = wanted[6] ? pairs::sink_gradient(p, grad.delta) : at::Tensor();
  return pairs::finish_all(
      {grad_query, grad_key, grad_value, g.attn_mask, g.key_padding_mask, g.relative_bias, grad_sink}, a);
}

TORCH_LIBRARY_IMPL(mha_ext, CompositeExplicitAutograd, m) {
  m.impl("attention", TORCH_FN(attention_kernel<attention_math>));
  m.impl("attention_with_weights", TORCH_FN(attention_with_weights_kernel<attention_with_weights_math>));
  m.impl("attention_for_backward", TORCH_FN(attention_for_backward_kernel<attention_for_backward_math>));
  m.impl("attention_backward", TORCH_FN(attention_backward_kernel<attention_backward_math>));
  m.impl("paged_attention", TORCH_FN(paged_attention_kernel<paged_attention_math>));
}

}  // namespace mha_ext
