// Linear maps of up to some hundred rows, by kernels of our own.
#pragma once

#include <ATen/core/Tensor.h>

namespace mha_ext::cpu {

// Whether short_linear is faster than the libraries for `input` (..., K) and `weight` (N, K) on this processor. Both
// are dense CPU tensors of one dtype.
bool is_short(const at::Tensor& input, const at::Tensor& weight);

// input @ weight^T + bias, which is contiguous.
at::Tensor short_linear(const at::Tensor& input, const at::Tensor& weight, const std::optional<at::Tensor>& bias);

// left^T @ right, (M, N) and (M, K): whether sum_of_rows is faster than the libraries.
bool is_short_sum(const at::Tensor& left, const at::Tensor& right);
at::Tensor sum_of_rows(const at::Tensor& left, const at::Tensor& right);

}  // namespace mha_ext::cpu
