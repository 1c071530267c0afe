#include "saved_arguments.h"

namespace mha_ext {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

std::array<at::Tensor, kNumGradients> differentiable(const AttentionArguments& a) {
  return {a.query, a.key, a.value, a.attn_mask, a.key_padding_mask, a.variants.relative_bias, a.variants.sink};
}

AttentionArguments with_inputs(AttentionArguments a, const std::array<at::Tensor, kNumGradients>& inputs) {
  a.query = inputs[0], a.key = inputs[1], a.value = inputs[2], a.attn_mask = inputs[3], a.key_padding_mask = inputs[4];
  a.variants.relative_bias = inputs[5], a.variants.sink = inputs[6];
  return a;
}

void save_call(AutogradContext* context, const AttentionArguments& a, const variable_list& others) {
  const auto inputs = differentiable(a);
  variable_list tensors(inputs.begin(), inputs.end());
  tensors.insert(tensors.end(), {a.dropout_seed, a.variants.key_range});
  tensors.insert(tensors.end(), others.begin(), others.end());
  context->save_for_backward(tensors);
  auto& numbers = context->saved_data;
  numbers["dropout_p"] = a.dropout_p;
  numbers["causal"] = a.causal;
  numbers["scale"] = a.scale;
  numbers["num_appended_keys"] = a.num_appended_keys;
  numbers["window_left"] = a.variants.window_left;
  numbers["window_right"] = a.variants.window_right;
  numbers["softcap"] = a.variants.softcap;
}

SavedCall load_call(AutogradContext* context) {
  const variable_list tensors = context->get_saved_variables();
  std::array<at::Tensor, kNumGradients> inputs;
  std::copy_n(tensors.begin(), kNumGradients, inputs.begin());
  AttentionArguments a = with_inputs({}, inputs);
  a.dropout_seed = tensors[kNumGradients], a.variants.key_range = tensors[kNumGradients + 1];
  auto& numbers = context->saved_data;
  a.dropout_p = numbers["dropout_p"].toDouble();
  a.causal = numbers["causal"].toInt();
  a.scale = numbers["scale"].toOptional<double>();
  a.num_appended_keys = numbers["num_appended_keys"].toInt();
  a.variants.window_left = numbers["window_left"].toInt();
  a.variants.window_right = numbers["window_right"].toInt();
  a.variants.softcap = numbers["softcap"].toDouble();
  return {a, variable_list(tensors.begin() + kNumGradients + 2, tensors.end())};
}

}  // namespace mha_ext
