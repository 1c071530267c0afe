// Which road a call takes at the Autograd key. Undefined tensors need nothing.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <torch/csrc/autograd/custom_function.h>

#include <algorithm>
#include <array>

namespace mha_ext {

// functorch keeps this key included as long as any of its transforms is active on the thread.
inline bool transform_is_active() {
  return c10::impl::tls_is_dispatch_key_included(c10::DispatchKey::FuncTorchDynamicLayerBackMode);
}

// A function transform is active, or a forward-mode tangent is attached: only ATen operators know what to do then.
template <size_t kCount>
bool must_decompose(const std::array<at::Tensor, kCount>& tensors) {
  if (transform_is_active()) return true;
  return std::any_of(tensors.begin(), tensors.end(),
                     [](const at::Tensor& t) { return t.defined() && t._fw_grad(/*level=*/0).defined(); });
}

template <size_t kCount>
bool needs_gradient(const std::array<at::Tensor, kCount>& tensors) {
  return at::GradMode::is_enabled() && std::any_of(tensors.begin(), tensors.end(), [](const at::Tensor& t) {
           return t.defined() && t.requires_grad();
         });
}

// Which of the tensors given to a Function's `apply`, in that order, need their gradient. Absent ones have no edge.
template <size_t kCount>
std::array<bool, kCount> wanted_gradients(const torch::autograd::AutogradContext* context,
                                          const std::array<at::Tensor, kCount>& tensors) {
  std::array<bool, kCount> wanted{};
  size_t edge = 0;
  for (size_t i = 0; i < kCount; ++i) {
    if (tensors[i].defined()) wanted[i] = context->needs_input_grad(edge++);
  }
  return wanted;
}

}  // namespace mha_ext
