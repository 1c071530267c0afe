// Linear maps where the whole layer is not one operator: at::linear, or on CPU the faster product.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/util/ArrayRef.h>

namespace mha_ext {

// Whether a call on these tensors, undefined ones aside, may go to CPU functions past the dispatcher: nobody but
// autograd has a say in it (no transform, tangent, autocast or dispatch mode).
bool runs_on_cpu_alone(at::ArrayRef<at::Tensor> tensors);

// The same as `linear`, where there is a faster product for it.
std::optional<at::Tensor> fast_linear(const at::Tensor& input, const at::Tensor& weight, const at::Tensor& bias);

// input (..., K) @ weight (N, K)^T + bias (N) or undefined; differentiable any number of times.
at::Tensor linear(const at::Tensor& input, const at::Tensor& weight, const at::Tensor& bias);

}  // namespace mha_ext
