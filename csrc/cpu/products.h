// Large matrix products of the projections, by the faster one of the libraries that PyTorch links.
#pragma once

#include <ATen/core/Tensor.h>

namespace mha_ext::cpu {

// Whether the functions below are faster than at::linear (with derivatives of their own, or none) for `input` (..., K)
// and `weight` (N, K) on this processor. Both are dense CPU tensors.
bool is_large(const at::Tensor& input, const at::Tensor& weight);

// input @ weight^T + bias.
at::Tensor large_linear(const at::Tensor& input, const at::Tensor& weight, const std::optional<at::Tensor>& bias);

// left @ right, (M, K) and (K, N), of any size.
at::Tensor product(const at::Tensor& left, const at::Tensor& right);

}  // namespace mha_ext::cpu
