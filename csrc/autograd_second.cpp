// Derivatives of the derivatives. Two operators hold them all: the product with the second derivative, which is the
// backward of the backward, and the forward's derivative along tangents, whose backward is made of the other and of
// the plain backward. Third derivatives are those of compositions over all pairs, made only when one is asked for:
// torch.func.grad keeps a graph of every backward, whether it will be differentiated or not.
#include <torch/csrc/autograd/autograd.h>
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

template <size_t kFirst, size_t kSecond>
std::array<at::Tensor, kFirst + kSecond> joined(const std::array<at::Tensor, kFirst>& first,
                                                const std::array<at::Tensor, kSecond>& second) {
  std::array<at::Tensor, kFirst + kSecond> all;
  std::copy(second.begin(), second.end(), std::copy(first.begin(), first.end(), all.begin()));
  return all;
}

at::Tensor constant(const at::Tensor& t) { return t.defined() ? t.detach() : t; }

// The forward's results count as what they are, functions of the inputs: nothing is sent to them.
struct BackwardCall {
  const AttentionArguments& arguments;
  const AttentionCotangents& cotangents;
};

std::array<at::Tensor, kNumGradients> as_array(const AttentionGradients& gradients) {
  return std::apply([](const auto&... g) { return std::array<at::Tensor, kNumGradients>{g...}; }, gradients);
}

variable_list as_list(const SecondGradients& gradients) {
  return std::apply([](const auto&... g) { return variable_list{g...}; }, gradients);
}

AttentionGradients as_gradients(const std::array<at::Tensor, kNumGradients>& gradients) {
  return std::tuple_cat(gradients);
}

std::array<at::Tensor, kNumSecondGradients> differentiable(const AttentionArguments& a, const AttentionCotangents& c) {
  return joined<kNumGradients, 2>(differentiable(a), {c.grad_out, c.grad_lse});
}

class BackwardFunction : public torch::autograd::Function<BackwardFunction> {
 public:
  static constexpr bool is_traceable = true;

  template <class... Tensors>
  static variable_list forward(AutogradContext* context, const Applied<BackwardCall>& applied, const Tensors&...) {
    const BelowAutograd below(applied.transforms);
    const BackwardCall& call = applied.call;
    context->set_materialize_grads(false);
    const AttentionCotangents& c = call.cotangents;
    const auto gradients = as_array(call_attention_backward(call.arguments, c));
    save_call(context, call.arguments,
              {c.grad_out, c.grad_lse, constant(c.out), constant(c.lse), constant(c.rounding)});
    context->saved_data["output_mask"] = as_number(c.output_mask);
    variable_list results;
    std::copy_if(gradients.begin(), gradients.end(), std::back_inserter(results),
                 [](const at::Tensor& gradient) { return gradient.defined(); });
    return results;
  }

  static variable_list backward(AutogradContext* context, const variable_list& grads) {
    const auto [a, others] = load_call(context);
    const auto given = as_flags<kNumGradients>(context->saved_data["output_mask"].toInt());
    BackwardTangents t{{others[0], others[1], others[2], others[3], given, others[4]}, {}, {}, {}, {}};
    for (size_t i = 0, next = 0; i < kNumGradients; ++i) {
      if (given[i]) t.inputs[i] = grads[next++];
    }
    t.output_mask = wanted_gradients(context, differentiable(a, t.cotangents));
    const SecondGradients g = call_attention_backward_jvp(a, t);
    return std::apply([](const auto&... grad) { return variable_list{at::Tensor(), grad...}; }, g);
  }
};

// `inputs` are those of the call, or what they are without their tangents, which the node keeps for its backward.
AttentionGradients differentiated(const AttentionArguments& a, const AttentionCotangents& c,
                                  const std::array<at::Tensor, kNumSecondGradients>& inputs) {
  const variable_list results = apply_function<BackwardFunction>(BackwardCall{a, c}, inputs);
  std::array<at::Tensor, kNumGradients> gradients;
  for (size_t i = 0, next = 0; i < kNumGradients; ++i) {
    if (c.output_mask[i]) gradients[i] = results[next++];
  }
  return as_gradients(gradients);
}

// Forward over reverse.
AttentionGradients with_tangents(const AttentionArguments& a, const AttentionCotangents& c) {
  auto inputs = differentiable(a);
  BackwardTangents t{c, {}, tangent_of(c.grad_out), tangent_of(c.grad_lse), {}};
  for (size_t i = 0; i < kNumGradients; ++i) {
    t.inputs[i] = tangent_of(inputs[i]), inputs[i] = primal_of(inputs[i]), t.output_mask[i] = c.output_mask[i];
  }
  for (at::Tensor* tensor : {&t.cotangents.grad_out, &t.cotangents.grad_lse, &t.cotangents.out, &t.cotangents.lse}) {
    *tensor = primal_of(*tensor);
  }
  const AttentionArguments primals = with_inputs(a, inputs);
  const auto constants = differentiable(primals, t.cotangents);
  const AttentionGradients gradients =
      needs_gradient(constants) ? differentiated(a, c, constants) : call_attention_backward(primals, t.cotangents);
  const SecondGradients moved = call_attention_backward_jvp(primals, t);
  const auto primal_gradients = as_array(gradients);
  const variable_list tangents = as_list(moved);
  for (size_t i = 0; i < kNumGradients; ++i) {
    if (!primal_gradients[i].defined()) continue;
    primal_gradients[i]._set_fw_grad(tangents[i], /*level=*/0, /*is_inplace_op=*/false);
  }
  return gradients;
}

AttentionGradients attention_backward_autograd(const AttentionArguments& a, const AttentionCotangents& c) {
  const auto inputs = differentiable(a, c);
  if (any_tangent(inputs)) return with_tangents(a, c);
  if (needs_gradient(inputs)) return differentiated(a, c, inputs);
  const at::AutoDispatchBelowADInplaceOrView guard;
  return call_attention_backward(a, c);
}

struct JvpCall {
  const AttentionArguments& arguments;
  const ForwardTangents& tangents;
};

// Reverse over forward. For w sent to the tangents of out and lse, what is sent on to the inputs' tangents is what the
// backward sends for w, and what is sent to the inputs themselves is its derivative along the tangents.
class JvpFunction : public torch::autograd::Function<JvpFunction> {
 public:
  static constexpr bool is_traceable = true;

  template <class... Tensors>
  static variable_list forward(AutogradContext* context, const Applied<JvpCall>& applied, const Tensors&...) {
    const BelowAutograd below(applied.transforms);
    const JvpCall& call = applied.call;
    context->set_materialize_grads(false);
    const ForwardTangents& t = call.tangents;
    variable_list others{constant(t.out), constant(t.lse), constant(t.rounding)};
    others.insert(others.end(), t.inputs.begin(), t.inputs.end());
    save_call(context, call.arguments, others);
    const auto [out, lse] = call_attention_jvp(call.arguments, t);
    return {out, lse};
  }

  static variable_list backward(AutogradContext* context, const variable_list& grads) {
    const auto [a, others] = load_call(context);
    variable_list result(2 * kNumGradients + 1);
    if (!grads[0].defined() && !grads[1].defined()) return result;
    Tangents tangents;
    std::copy_n(others.begin() + 3, kNumGradients, tangents.begin());
    const auto wanted = wanted_gradients(context, joined(differentiable(a), tangents));
    AttentionCotangents c{grads[0], grads[1], others[0], others[1], {}, others[2]};
    std::copy_n(wanted.begin() + kNumGradients, kNumGradients, c.output_mask.begin());
    const auto of_tangents = as_array(call_attention_backward(a, c));
    BackwardTangents t{c, tangents, {}, {}, {}};
    std::copy_n(wanted.begin(), kNumGradients, t.output_mask.begin());
    const SecondGradients of_inputs = call_attention_backward_jvp(a, t);
    std::tie(result[1], result[2], result[3], result[4], result[5], result[6], result[7], std::ignore, std::ignore) =
        of_inputs;
    std::copy(of_tangents.begin(), of_tangents.end(), result.begin() + 1 + kNumGradients);
    return result;
  }
};

AttentionResult attention_jvp_autograd(const AttentionArguments& a, const ForwardTangents& t) {
  const auto inputs = joined(differentiable(a), t.inputs);
  if (any_tangent(inputs)) return attention_jvp_math(a, t);
  if (needs_gradient(inputs)) {
    const variable_list results = apply_function<JvpFunction>(JvpCall{a, t}, inputs);
    return {results[0], results[1]};
  }
  const at::AutoDispatchBelowADInplaceOrView guard;
  return call_attention_jvp(a, t);
}

constexpr size_t kNumSecondInputs = 2 * kNumSecondGradients;

// Inputs, cotangents, and the tangents of both.
std::array<at::Tensor, kNumSecondInputs> differentiable(const AttentionArguments& a, const BackwardTangents& t) {
  return joined(joined(differentiable(a, t.cotangents), t.inputs), std::array<at::Tensor, 2>{t.grad_out, t.grad_lse});
}

void set_inputs(const std::array<at::Tensor, kNumSecondInputs>& inputs, AttentionArguments& a, BackwardTangents& t) {
  std::array<at::Tensor, kNumGradients> primals;
  std::copy_n(inputs.begin(), kNumGradients, primals.begin());
  a = with_inputs(a, primals);
  t.cotangents.grad_out = inputs[kNumGradients], t.cotangents.grad_lse = inputs[kNumGradients + 1];
  std::copy_n(inputs.begin() + kNumSecondGradients, kNumGradients, t.inputs.begin());
  t.grad_out = inputs[kNumSecondInputs - 2], t.grad_lse = inputs[kNumSecondInputs - 1];
}

struct SecondCall {
  const AttentionArguments& arguments;
  const BackwardTangents& tangents;
};

variable_list defined_of(const variable_list& tensors) {
  variable_list found;
  std::copy_if(tensors.begin(), tensors.end(), std::back_inserter(found),
               [](const at::Tensor& t) { return t.defined(); });
  return found;
}

class SecondFunction : public torch::autograd::Function<SecondFunction> {
 public:
  template <class... Tensors>
  static variable_list forward(AutogradContext* context, const Applied<SecondCall>& applied, const Tensors&...) {
    const BelowAutograd below(applied.transforms);
    const auto& [a, t] = applied.call;
    context->set_materialize_grads(false);
    const AttentionCotangents& c = t.cotangents;
    variable_list others{constant(c.out), constant(c.lse), constant(c.rounding), c.grad_out, c.grad_lse};
    others.insert(others.end(), t.inputs.begin(), t.inputs.end());
    others.insert(others.end(), {t.grad_out, t.grad_lse});
    save_call(context, a, others);
    context->saved_data["output_mask"] = as_number(t.output_mask);
    return defined_of(as_list(call_attention_backward_jvp(a, t)));
  }

  // The composition, and its gradients by autograd. Inputs are told apart by views: one tensor may be several of them.
  static variable_list backward(AutogradContext* context, const variable_list& grads) {
    auto [a, others] = load_call(context);
    BackwardTangents t{{others[3], others[4], others[0], others[1], {}, others[2]}, {}, others[12], others[13], {}};
    std::copy_n(others.begin() + 5, kNumGradients, t.inputs.begin());
    t.output_mask = as_flags<kNumSecondGradients>(context->saved_data["output_mask"].toInt());
    auto inputs = differentiable(a, t);
    const auto wanted = wanted_gradients(context, inputs);
    const bool differentiates = at::GradMode::is_enabled();
    const at::AutoGradMode enabled(true);
    variable_list sources;
    for (size_t i = 0; i < kNumSecondInputs; ++i) {
      if (!wanted[i]) continue;
      inputs[i] = inputs[i].view_as(inputs[i]);
      sources.push_back(inputs[i]);
    }
    set_inputs(inputs, a, t);
    const variable_list computed = defined_of(as_list(attention_backward_jvp_math(a, t)));
    variable_list results;
    for (size_t i = 0; i < computed.size(); ++i) {
      if (grads[i].defined()) results.push_back(computed[i]);
    }
    const variable_list found =
        torch::autograd::grad(results, sources, defined_of(grads), /*retain_graph=*/differentiates,
                              /*create_graph=*/differentiates, /*allow_unused=*/true);
    variable_list gradients(kNumSecondInputs + 1);  // the first is the call's
    for (size_t i = 0, next = 0; i < kNumSecondInputs; ++i) {
      if (wanted[i]) gradients[i + 1] = found[next++];
    }
    return gradients;
  }
};

SecondGradients attention_backward_jvp_autograd(const AttentionArguments& a, const BackwardTangents& t) {
  const auto inputs = differentiable(a, t);
  if (any_tangent(inputs)) return attention_backward_jvp_math(a, t);
  if (needs_gradient(inputs)) {
    const variable_list results = apply_function<SecondFunction>(SecondCall{a, t}, inputs);
    std::array<at::Tensor, kNumSecondGradients> gradients;
    for (size_t i = 0, next = 0; i < kNumSecondGradients; ++i) {
      if (t.output_mask[i]) gradients[i] = results[next++];
    }
    return std::tuple_cat(gradients);
  }
  const at::AutoDispatchBelowADInplaceOrView guard;
  return call_attention_backward_jvp(a, t);
}

WeightsGradients attention_weights_backward_autograd(const AttentionArguments& a, const WeightsCotangents& c) {
  const auto inputs = joined<kNumGradients, 1>(differentiable(a), {c.grad_weights});
  if (any_tangent(inputs) || needs_gradient(inputs)) return attention_weights_backward_math(a, c);
  const at::AutoDispatchBelowADInplaceOrView guard;
  return call_attention_weights_backward(a, c);
}

}  // namespace

TORCH_LIBRARY_IMPL(mha_ext, Autograd, m) {
  m.impl("attention_backward", TORCH_FN(attention_backward_kernel<attention_backward_autograd>));
  m.impl("attention_jvp", TORCH_FN(attention_jvp_kernel<attention_jvp_autograd>));
  m.impl("attention_backward_jvp", TORCH_FN(attention_backward_jvp_kernel<attention_backward_jvp_autograd>));
  m.impl("attention_weights_backward",
         TORCH_FN(attention_weights_backward_kernel<attention_weights_backward_autograd>));
}

}  // namespace mha_ext
