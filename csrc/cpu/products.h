// Matrix products of the projections: of few rows by kernels of our own, else by the faster one of the libraries that
// PyTorch links.
#pragma once

#include <ATen/core/Tensor.h>

namespace mha_ext::cpu {

// Whether fast_linear can multiply these and is faster than at::linear on this processor: `input` (..., K), `weight`
// (N, K) and `bias` (N), dense CPU tensors.
bool has_fast_linear(const at::Tensor& input, const at::Tensor& weight, const std::optional<at::Tensor>& bias);

// input @ weight^T + bias.
at::Tensor fast_linear(const at::Tensor& input, const at::Tensor& weight, const std::optional<at::Tensor>& bias);

// left @ right, (M, K) and (K, N), of any size.
at::Tensor product(const at::Tensor& left, const at::Tensor& right);

// left^T @ right, (M, N) and (M, K), of any size.
at::Tensor transposed_product(const at::Tensor& left, const at::Tensor& right);

}  // namespace mha_ext::cpu
