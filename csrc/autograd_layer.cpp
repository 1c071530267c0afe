// Derivatives of the layer operator, by the same three roads as in autograd.cpp.
#include <torch/csrc/autograd/custom_function.h>
#include <torch/library.h>

#include "composite.h"
#include "differentiation.h"
#include "signatures.h"

namespace mha_ext {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

// A shared input counts once.
std::array<at::Tensor, kNumLayerGradients> differentiable(const LayerArguments& a) {
  return {a.query,
          a.shared_inputs == kSharedAll ? at::Tensor() : a.key,
          a.shared_inputs == kSeparateInputs ? a.value : at::Tensor(),
          a.in_proj_weight,
          a.in_proj_bias,
          a.out_proj_weight,
          a.out_proj_bias,
          a.attn_mask,
          a.key_padding_mask};
}

void save_numbers(AutogradContext* context, const LayerArguments& a) {
  context->saved_data["num_heads"] = a.num_heads;
  context->saved_data["num_kv_heads"] = a.num_kv_heads;
  context->saved_data["shared_inputs"] = a.shared_inputs;
  context->saved_data["batch_first"] = a.batch_first;
  context->saved_data["dropout_p"] = a.dropout_p;
  context->saved_data["causal"] = a.causal;
  context->saved_data["scale"] = a.scale;
}

LayerArguments load_arguments(AutogradContext* context, const variable_list& saved) {
  auto& data = context->saved_data;
  return {saved[0],
          saved[1],
          saved[2],
          saved[3],
          saved[4],
          saved[5],
          saved[6],
          saved[7],
          saved[8],
          saved[9],
          data["num_heads"].toInt(),
          data["num_kv_heads"].toInt(),
          data["shared_inputs"].toInt(),
          data["batch_first"].toBool(),
          data["dropout_p"].toDouble(),
          data["causal"].toInt(),
          data["scale"].toOptional<double>(),
          /*keep_rounding=*/false};
}

// What `apply` gets besides the differentiable tensors. The Function returns `out` alone and leaves the state here:
// outputs marked as non-differentiable are not traceable.
struct LayerCall {
  const LayerArguments& arguments;
  LayerState& state;
};

class LayerFunction : public torch::autograd::Function<LayerFunction> {
 public:
  static constexpr bool is_traceable = true;

  static at::Tensor forward(AutogradContext* context, const at::Tensor&, const OptionalTensor&, const OptionalTensor&,
                            const at::Tensor&, const OptionalTensor&, const at::Tensor&, const OptionalTensor&,
                            const OptionalTensor&, const OptionalTensor&, const LayerCall& call) {
    const at::AutoDispatchBelowADInplaceOrView guard;
    LayerArguments a = call.arguments;
    a.keep_rounding = is_half(a.query);
    LayerState& s = call.state;
    at::Tensor out;
    std::tie(out, s.q, s.k, s.v, s.context, s.lse, s.rounding) = call_multi_head_attention(a);
    context->save_for_backward({a.query, a.key, a.value, a.in_proj_weight, a.in_proj_bias, a.out_proj_weight,
                                a.out_proj_bias, a.attn_mask, a.key_padding_mask, a.dropout_seed, s.q, s.k, s.v,
                                s.context, s.lse, s.rounding});
    save_numbers(context, a);
    return out;
  }

  static variable_list backward(AutogradContext* context, const variable_list& grads) {
    const variable_list saved = context->get_saved_variables();
    const LayerArguments a = load_arguments(context, saved);
    const LayerState state{saved[10], saved[11], saved[12], saved[13], saved[14], saved[15]};
    const auto wanted = wanted_gradients<kNumLayerGradients>(context, differentiable(a));
    const auto [query, key, value, in_weight, in_bias, out_weight, out_bias, attn_mask, key_padding_mask] =
        call_multi_head_attention_backward(a, {grads[0], state, wanted});
    return {query, key, value, in_weight, in_bias, out_weight, out_bias, attn_mask, key_padding_mask, at::Tensor()};
  }
};

LayerResult multi_head_attention_autograd(const LayerArguments& a) {
  const auto inputs = differentiable(a);
  if (must_decompose(inputs)) return multi_head_attention_differentiable(a);
  if (needs_gradient(inputs)) {
    LayerState s;
    const at::Tensor out = LayerFunction::apply(inputs[0], to_optional(inputs[1]), to_optional(inputs[2]), inputs[3],
                                                to_optional(inputs[4]), inputs[5], to_optional(inputs[6]),
                                                to_optional(inputs[7]), to_optional(inputs[8]), LayerCall{a, s});
    return {out, s.q, s.k, s.v, s.context, s.lse, s.rounding};
  }
  const at::AutoDispatchBelowADInplaceOrView guard;
  return call_multi_head_attention(a);
}

LayerGradients multi_head_attention_backward_autograd(const LayerArguments& a, const LayerCotangents& c) {
  const auto inputs = differentiable(a);
  const std::array<at::Tensor, 1> grads{c.grad_out};
  if (must_decompose(inputs) || must_decompose(grads) || needs_gradient(inputs) || needs_gradient(grads)) {
    return multi_head_attention_backward_from_inputs(a, c);
  }
  const at::AutoDispatchBelowADInplaceOrView guard;
  return call_multi_head_attention_backward(a, c);
}

}  // namespace

TORCH_LIBRARY_IMPL(mha_ext, Autograd, m) {
  m.impl("multi_head_attention", TORCH_FN(multi_head_attention_kernel<multi_head_attention_autograd>));
  m.impl("multi_head_attention_backward",
         TORCH_FN(multi_head_attention_backward_kernel<multi_head_attention_backward_autograd>));
}

}  // namespace mha_ext
