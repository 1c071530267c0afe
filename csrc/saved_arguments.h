// What a Function keeps of an attention call for its backward.
#pragma once

#include <torch/csrc/autograd/custom_function.h>

#include "attention.h"

namespace mha_ext {

// The inputs that may need a derivative, in the order of kNumGradients.
std::array<at::Tensor, kNumGradients> differentiable(const AttentionArguments& arguments);
// The same arguments with other such inputs.
AttentionArguments with_inputs(AttentionArguments arguments, const std::array<at::Tensor, kNumGradients>& inputs);

// The arguments, and what else the backward reads.
void save_call(torch::autograd::AutogradContext* context, const AttentionArguments& arguments,
               const torch::autograd::variable_list& others);

struct SavedCall {
  AttentionArguments arguments;
  torch::autograd::variable_list others;
};
SavedCall load_call(torch::autograd::AutogradContext* context);

// Flags as one number, which is what every kind of tracing can keep.
template <size_t kCount>
int64_t as_number(const std::array<bool, kCount>& flags) {
  int64_t number = 0;
  for (size_t i = 0; i < kCount; ++i) number |= int64_t{flags[i]} << i;
  return number;
}

template <size_t kCount>
std::array<bool, kCount> as_flags(int64_t number) {
  std::array<bool, kCount> flags{};
  for (size_t i = 0; i < kCount; ++i) flags[i] = (number >> i & 1) != 0;
  return flags;
}

}  // namespace mha_ext
