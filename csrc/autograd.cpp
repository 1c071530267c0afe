// Derivatives of the attention operators. Three roads at the Autograd key, whatever transforms are active:
// - an input carries a forward-mode tangent: the results of the inputs without it, and theirs by an operator of ours;
// - an input requires a gradient: a Function whose backward is our backward operator;
// - else: on to the device's kernel, or the next transform.
#include <ATen/TensorOperators.h>
#include <ATen/ops/empty.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/library.h>

#include "composite.h"
#include "differentiation.h"
#include "saved_arguments.h"
#include "signatures.h"

namespace mha_ext {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

// What a Function gets besides the differentiable tensors; `rounding` is left there, as it has no derivative.
struct AttentionCall {
  const AttentionArguments& arguments;
  int64_t weights;
  at::Tensor& rounding;
};

// Results of the forward as an autograd node keeps them.
ForBackwardResult compute(const AttentionArguments& a, int64_t weights) {
  if (is_half(a.query)) return call_attention_for_backward(a, weights);
  if (weights == kNoWeights) return std::tuple_cat(call_attention(a), std::tuple(at::Tensor(), at::Tensor()));
  return std::tuple_cat(call_attention_with_weights(a, weights == kMeanWeights), std::tuple(at::Tensor()));
}

at::Tensor sum_of(const at::Tensor& a, const at::Tensor& b) {
  return a.defined() && b.defined() ? a + b : a.defined() ? a : b;
}

class AttentionFunction : public torch::autograd::Function<AttentionFunction> {
 public:
  static constexpr bool is_traceable = true;

  template <class... Tensors>
  static variable_list forward(AutogradContext* context, const Applied<AttentionCall>& applied, const Tensors&...) {
    const BelowAutograd below(applied.transforms);
    const AttentionCall& call = applied.call;
    context->set_materialize_grads(false);
    const auto [out, lse, weights, rounding] = compute(call.arguments, call.weights);
    call.rounding = rounding;
    save_call(context, call.arguments, {out, lse, rounding});
    context->saved_data["weights"] = call.weights;
    if (call.weights == kNoWeights) return {out, lse};
    return {out, lse, weights};
  }

  // Few losses look at the weights: what they do not ask for is not computed.
  static variable_list backward(AutogradContext* context, const variable_list& grads) {
    const auto [a, results] = load_call(context);
    const auto wanted = wanted_gradients(context, differentiable(a));
    variable_list sums(kNumGradients + 1);  // the first is the call's
    if (grads[0].defined() || grads[1].defined()) {
      std::tie(sums[1], sums[2], sums[3], sums[4], sums[5], sums[6], sums[7]) =
          call_attention_backward(a, {grads[0], grads[1], results[0], results[1], wanted, results[2]});
    }
    if (grads.size() == 3 && grads[2].defined()) {
      AttentionArguments scores = a;
      scores.value = at::Tensor();
      const bool average = context->saved_data["weights"].toInt() == kMeanWeights;
      const auto [query, key, attn_mask, key_padding_mask, bias, sink] = call_attention_weights_backward(
          scores, {grads[2], results[1], average, {wanted[0], wanted[1], wanted[3], wanted[4], wanted[5], wanted[6]}});
      sums[1] = sum_of(sums[1], query), sums[2] = sum_of(sums[2], key);
      sums[4] = sum_of(sums[4], attn_mask), sums[5] = sum_of(sums[5], key_padding_mask);
      sums[6] = sum_of(sums[6], bias), sums[7] = sum_of(sums[7], sink);
    }
    return sums;
  }
};

AttentionArguments primals_of(const AttentionArguments& a) {
  auto inputs = differentiable(a);
  for (at::Tensor& input : inputs) input = primal_of(input);
  return with_inputs(a, inputs);
}

// As the node gives them: out, lse and perhaps the weights. `inputs` are those of the call, or what they are without
// their tangents, which a node keeps for its backward.
variable_list differentiated(const AttentionArguments& a, const std::array<at::Tensor, kNumGradients>& inputs,
                             int64_t weights, at::Tensor& rounding) {
  return apply_function<AttentionFunction>(AttentionCall{a, weights, rounding}, inputs);
}

ForBackwardResult without_tangents(const AttentionArguments& a, const AttentionArguments& primals) {
  const auto inputs = differentiable(primals);
  if (!needs_gradient(inputs)) return compute(primals, kNoWeights);
  at::Tensor rounding;
  const variable_list results = differentiated(a, inputs, kNoWeights, rounding);
  return {results[0], results[1], at::Tensor(), rounding};
}

// Forward mode: tangents of out and lse, from those of the inputs.
ForBackwardResult with_tangents(const AttentionArguments& a) {
  const AttentionArguments primals = primals_of(a);
  const auto [out, lse, weights, rounding] = without_tangents(a, primals);
  ForwardTangents tangents{out, lse, differentiable(a), rounding};
  for (at::Tensor& tangent : tangents.inputs) tangent = tangent_of(tangent);
  const auto [moved_out, moved_lse] = call_attention_jvp(primals, tangents);
  out._set_fw_grad(moved_out, /*level=*/0, /*is_inplace_op=*/false);
  lse._set_fw_grad(moved_lse, /*level=*/0, /*is_inplace_op=*/false);
  return {out, lse, weights, rounding};
}

AttentionResult attention_autograd(const AttentionArguments& a) {
  const auto inputs = differentiable(a);
  if (any_tangent(inputs)) {
    const auto [out, lse, weights, rounding] = with_tangents(a);
    return {out, lse};
  }
  if (needs_gradient(inputs)) {
    at::Tensor rounding;
    const variable_list results = differentiated(a, inputs, kNoWeights, rounding);
    return {results[0], results[1]};
  }
  const at::AutoDispatchBelowADInplaceOrView guard;
  return call_attention(a);
}

WeightsResult attention_with_weights_autograd(const AttentionArguments& a, bool average) {
  const auto inputs = differentiable(a);
  if (any_tangent(inputs)) return attention_with_weights_math(a, average);
  if (needs_gradient(inputs)) {
    at::Tensor rounding;
    const variable_list results = differentiated(a, inputs, average ? kMeanWeights : kWeightsPerHead, rounding);
    return {results[0], results[1], results[2]};
  }
  const at::AutoDispatchBelowADInplaceOrView guard;
  return call_attention_with_weights(a, average);
}

// Differentiated itself when a node further down, of another transform, is to be differentiated.
ForBackwardResult attention_for_backward_autograd(const AttentionArguments& a, int64_t weights) {
  const auto inputs = differentiable(a);
  if (any_tangent(inputs)) {
    if (weights != kNoWeights || !is_half(a.query)) return attention_for_backward_math(a, weights);
    auto [out, lse, none, rounding] = with_tangents(a);
    return {out, lse, at::empty({0}, a.query.options()), rounding};
  }
  if (needs_gradient(inputs)) {
    if (!is_half(a.query)) return attention_for_backward_math(a, weights);
    at::Tensor rounding;
    const variable_list results = differentiated(a, inputs, weights, rounding);
    return {results[0], results[1], results.size() == 3 ? results[2] : at::empty({0}, a.query.options()), rounding};
  }
  const at::AutoDispatchBelowADInplaceOrView guard;
  return call_attention_for_backward(a, weights);
}

// A cache of pages is state of inference.
AttentionResult paged_attention_autograd(const PagedArguments& a) {
  const std::array<at::Tensor, 4> inputs{a.query, a.key_pages, a.value_pages, a.sink};
  TORCH_CHECK_NOT_IMPLEMENTED(!needs_gradient(inputs) && !must_decompose(inputs),
                              "paged_attention: inputs must not need derivatives, got one that does (gather the pages "
                              "and call attention)");
  const at::AutoDispatchBelowADInplaceOrView guard;
  return call_paged_attention(a);
}

}  // namespace

TORCH_LIBRARY_IMPL(mha_ext, Autograd, m) {
  m.impl("paged_attention", TORCH_FN(paged_attention_kernel<paged_attention_autograd>));
  m.impl("attention", TORCH_FN(attention_kernel<attention_autograd>));
  m.impl("attention_with_weights", TORCH_FN(attention_with_weights_kernel<attention_with_weights_autograd>));
  m.impl("attention_for_backward", TORCH_FN(attention_for_backward_kernel<attention_for_backward_autograd>));
}

}  // namespace mha_ext
