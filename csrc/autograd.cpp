// Derivatives of the attention operators. Three roads at the Autograd key:
// - a function transform (vmap, jvp, torch.func.grad, ...) is active or an input carries a forward-mode tangent:
//   the ATen composition, which every transform can take apart;
// - an input requires a gradient: a Function whose backward is our backward operator;
// - else: on to the device's kernel.
// The backward operators have closed forms in ATen, re-derived from the inputs, for whoever differentiates them.
#include <ATen/TensorOperators.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/library.h>

#include "composite.h"
#include "differentiation.h"
#include "signatures.h"

namespace mha_ext {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

// Numbers that a Function keeps for its backward.
void save_numbers(AutogradContext* context, const AttentionArguments& a) {
  context->saved_data["dropout_p"] = a.dropout_p;
  context->saved_data["causal"] = a.causal;
  context->saved_data["scale"] = a.scale;
  context->saved_data["num_appended_keys"] = a.num_appended_keys;
  context->saved_data["window_left"] = a.variants.window_left;
  context->saved_data["window_right"] = a.variants.window_right;
  context->saved_data["softcap"] = a.variants.softcap;
}

// The arguments of the forward, from what was saved.
AttentionArguments load_arguments(AutogradContext* context, const variable_list& saved) {
  AttentionArguments a{saved[0], saved[1], saved[2], saved[3], saved[4], saved[5]};
  a.dropout_p = context->saved_data["dropout_p"].toDouble();
  a.causal = context->saved_data["causal"].toInt();
  a.scale = context->saved_data["scale"].toOptional<double>();
  a.num_appended_keys = context->saved_data["num_appended_keys"].toInt();
  a.variants = {saved[6],
                saved[7],
                saved[8],
                context->saved_data["window_left"].toInt(),
                context->saved_data["window_right"].toInt(),
                context->saved_data["softcap"].toDouble()};
  return a;
}

void save_tensors(AutogradContext* context, const AttentionArguments& a, const at::Tensor& out, const at::Tensor& lse,
                  const at::Tensor& rounding) {
  const Variants& v = a.variants;
  context->save_for_backward({a.query, a.key, a.value, a.attn_mask, a.key_padding_mask, a.dropout_seed, v.key_range,
                              v.relative_bias, v.sink, out, lse, rounding});
}

AttentionGradients output_gradients(const AttentionArguments& a, const variable_list& saved, const variable_list& grads,
                                    const std::array<bool, kNumGradients>& wanted) {
  return call_attention_backward(a, {grads[0], grads[1], saved[9], saved[10], wanted, saved[11]});
}

std::array<at::Tensor, kNumGradients> differentiable(const AttentionArguments& a) {
  return {a.query, a.key, a.value, a.attn_mask, a.key_padding_mask, a.variants.relative_bias, a.variants.sink};
}

// Only differentiable tensors are parameters of `apply`; masks and the seed come along in the arguments.
class AttentionFunction : public torch::autograd::Function<AttentionFunction> {
 public:
  static constexpr bool is_traceable = true;

  static variable_list forward(AutogradContext* context, const at::Tensor&, const at::Tensor&, const at::Tensor&,
                               const OptionalTensor&, const OptionalTensor&, const OptionalTensor&,
                               const OptionalTensor&, const AttentionArguments& a) {
    const at::AutoDispatchBelowADInplaceOrView guard;
    context->set_materialize_grads(false);
    at::Tensor out, lse, rounding;
    if (is_half(a.query)) {
      std::tie(out, lse, std::ignore, rounding) = call_attention_for_backward(a, kNoWeights);
    } else {
      std::tie(out, lse) = call_attention(a);
    }
    save_tensors(context, a, out, lse, rounding);
    save_numbers(context, a);
    return {out, lse};
  }

  static variable_list backward(AutogradContext* context, const variable_list& grads) {
    const variable_list saved = context->get_saved_variables();
    const AttentionArguments a = load_arguments(context, saved);
    if (!grads[0].defined() && !grads[1].defined()) return variable_list(kNumGradients + 1);
    const auto wanted = wanted_gradients(context, differentiable(a));
    const auto [query, key, value, attn_mask, key_padding_mask, bias, sink] = output_gradients(a, saved, grads, wanted);
    return {query, key, value, attn_mask, key_padding_mask, bias, sink, at::Tensor()};
  }
};

struct WeightsCall {
  const AttentionArguments& arguments;
  bool average;
};

at::Tensor sum_of(const at::Tensor& a, const at::Tensor& b) {
  return a.defined() && b.defined() ? a + b : a.defined() ? a : b;
}

class WeightsFunction : public torch::autograd::Function<WeightsFunction> {
 public:
  static constexpr bool is_traceable = true;

  static variable_list forward(AutogradContext* context, const at::Tensor&, const at::Tensor&, const at::Tensor&,
                               const OptionalTensor&, const OptionalTensor&, const OptionalTensor&,
                               const OptionalTensor&, const WeightsCall& call) {
    const at::AutoDispatchBelowADInplaceOrView guard;
    const AttentionArguments& a = call.arguments;
    context->set_materialize_grads(false);
    at::Tensor out, lse, weights, rounding;
    if (is_half(a.query)) {
      std::tie(out, lse, weights, rounding) =
          call_attention_for_backward(a, call.average ? kMeanWeights : kWeightsPerHead);
    } else {
      std::tie(out, lse, weights) = call_attention_with_weights(a, call.average);
    }
    save_tensors(context, a, out, lse, rounding);
    save_numbers(context, a);
    context->saved_data["average"] = call.average;
    return {out, lse, weights};
  }

  // Few losses look at the weights: what they do not ask for is not computed.
  static variable_list backward(AutogradContext* context, const variable_list& grads) {
    const variable_list saved = context->get_saved_variables();
    AttentionArguments a = load_arguments(context, saved);
    const auto wanted = wanted_gradients(context, differentiable(a));
    variable_list result(kNumGradients + 1);
    if (grads[0].defined() || grads[1].defined()) {
      std::tie(result[0], result[1], result[2], result[3], result[4], result[5], result[6]) =
          output_gradients(a, saved, grads, wanted);
    }
    if (grads[2].defined()) {
      a.value = at::Tensor();
      const bool average = context->saved_data["average"].toBool();
      const auto [query, key, attn_mask, key_padding_mask, bias, sink] = call_attention_weights_backward(
          a, {grads[2], saved[10], average, {wanted[0], wanted[1], wanted[3], wanted[4], wanted[5], wanted[6]}});
      result[0] = sum_of(result[0], query), result[1] = sum_of(result[1], key);
      result[3] = sum_of(result[3], attn_mask), result[4] = sum_of(result[4], key_padding_mask);
      result[5] = sum_of(result[5], bias), result[6] = sum_of(result[6], sink);
    }
    return result;
  }
};

AttentionResult attention_autograd(const AttentionArguments& a) {
  const auto inputs = differentiable(a);
  if (must_decompose(inputs)) return attention_math(a);
  if (needs_gradient(inputs)) {
    const variable_list results =
        AttentionFunction::apply(a.query, a.key, a.value, to_optional(a.attn_mask), to_optional(a.key_padding_mask),
                                 to_optional(a.variants.relative_bias), to_optional(a.variants.sink), a);
    return {results[0], results[1]};
  }
  const at::AutoDispatchBelowADInplaceOrView guard;
  return call_attention(a);
}

AttentionGradients attention_backward_autograd(const AttentionArguments& a, const AttentionCotangents& c) {
  const auto inputs = differentiable(a);
  const std::array<at::Tensor, 2> grads{c.grad_out, c.grad_lse};
  if (must_decompose(inputs) || must_decompose(grads) || needs_gradient(inputs) || needs_gradient(grads)) {
    return attention_backward_math(a, c);
  }
  const at::AutoDispatchBelowADInplaceOrView guard;
  return call_attention_backward(a, c);
}

WeightsResult attention_with_weights_autograd(const AttentionArguments& a, bool average) {
  const auto inputs = differentiable(a);
  if (must_decompose(inputs)) return attention_with_weights_math(a, average);
  if (needs_gradient(inputs)) {
    const variable_list results = WeightsFunction::apply(
        a.query, a.key, a.value, to_optional(a.attn_mask), to_optional(a.key_padding_mask),
        to_optional(a.variants.relative_bias), to_optional(a.variants.sink), WeightsCall{a, average});
    return {results[0], results[1], results[2]};
  }
  const at::AutoDispatchBelowADInplaceOrView guard;
  return call_attention_with_weights(a, average);
}

// Where it is differentiated itself, a composition: nothing is saved then, and there is no backward of ours to serve.
ForBackwardResult attention_for_backward_autograd(const AttentionArguments& a, int64_t weights) {
  const auto inputs = differentiable(a);
  if (must_decompose(inputs) || needs_gradient(inputs)) return attention_for_backward_math(a, weights);
  const at::AutoDispatchBelowADInplaceOrView guard;
  return call_attention_for_backward(a, weights);
}

WeightsGradients attention_weights_backward_autograd(const AttentionArguments& a, const WeightsCotangents& c) {
  const auto inputs = differentiable(a);
  const std::array<at::Tensor, 1> grads{c.grad_weights};
  if (must_decompose(inputs) || must_decompose(grads) || needs_gradient(inputs) || needs_gradient(grads)) {
    return attention_weights_backward_math(a, c);
  }
  const at::AutoDispatchBelowADInplaceOrView guard;
  return call_attention_weights_backward(a, c);
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
  m.impl("attention_backward", TORCH_FN(attention_backward_kernel<attention_backward_autograd>));
  m.impl("attention_with_weights", TORCH_FN(attention_with_weights_kernel<attention_with_weights_autograd>));
  m.impl("attention_for_backward", TORCH_FN(attention_for_backward_kernel<attention_for_backward_autograd>));
  m.impl("attention_weights_backward",
         TORCH_FN(attention_weights_backward_kernel<attention_weights_backward_autograd>));
}

}  // namespace mha_ext
