// Which road a call takes at the Autograd key. Undefined tensors need nothing.
#pragma once

#include <ATen/FuncTorchTLS.h>
#include <ATen/core/Tensor.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <torch/csrc/autograd/custom_function.h>

#include <algorithm>
#include <array>
#include <memory>
#include <tuple>
#include <utility>

#include "attention.h"

namespace mha_ext {

// functorch keeps this key included as long as any of its transforms is active on the thread.
inline bool transform_is_active() {
  return c10::impl::tls_is_dispatch_key_included(c10::DispatchKey::FuncTorchDynamicLayerBackMode);
}

// What forward mode has attached to a tensor; undefined when that is nothing or zero.
inline at::Tensor tangent_of(const at::Tensor& t) {
  if (!t.defined()) return t;
  const at::Tensor& tangent = t._fw_grad(/*level=*/0);
  return tangent.defined() && tangent._is_zerotensor() ? at::Tensor() : tangent;
}

inline at::Tensor primal_of(const at::Tensor& t) {
  return t.defined() && t._fw_grad(/*level=*/0).defined() ? t._fw_primal(/*level=*/0) : t;
}

template <size_t kCount>
bool any_tangent(const std::array<at::Tensor, kCount>& tensors) {
  return std::any_of(tensors.begin(), tensors.end(),
                     [](const at::Tensor& t) { return t.defined() && t._fw_grad(/*level=*/0).defined(); });
}

// A function transform is active, or a forward-mode tangent is attached: for functions made of operators that know
// what to do then.
template <size_t kCount>
bool must_decompose(const std::array<at::Tensor, kCount>& tensors) {
  return transform_is_active() || any_tangent(tensors);
}

template <size_t kCount>
bool needs_gradient(const std::array<at::Tensor, kCount>& tensors) {
  return at::GradMode::is_enabled() && std::any_of(tensors.begin(), tensors.end(), [](const at::Tensor& t) {
           return t.defined() && t.requires_grad();
         });
}

// torch.func.grad and its kin keep C++ Functions out, as most could not tell one level of transforms from another. Ours
// need not: they run at the Autograd key of one level, where forward calls operators below it that go on to the next
// level by themselves, and nothing else is done there. So while `apply` asks, the transforms are out of sight; forward
// brings them back.
class TransformsApart {
 public:
  TransformsApart() : apart_(std::move(at::functorch::functorchTLSAccessor())) {}
  ~TransformsApart() { bring_back(); }
  TransformsApart(const TransformsApart&) = delete;
  TransformsApart& operator=(const TransformsApart&) = delete;

  void bring_back() {
    if (apart_ != nullptr) at::functorch::functorchTLSAccessor() = std::move(apart_);
  }

 private:
  std::unique_ptr<at::functorch::FuncTorchTLSBase> apart_;
};

// The first argument of a Function's forward.
template <class Call>
struct Applied {
  const Call& call;
  TransformsApart& transforms;
};

// While forward computes: below the Autograd key. Levels of transforms further down have gradient modes of their own,
// for which the one that `apply` switches off is not meant.
class BelowAutograd {
 public:
  explicit BelowAutograd(TransformsApart& transforms) : grad_mode_(transform_is_active()) { transforms.bring_back(); }

 private:
  at::AutoDispatchBelowADInplaceOrView below_;
  at::AutoGradMode grad_mode_;
};

// Function::apply of a call and tensors that may be undefined.
template <class Function, class Call, size_t kCount>
torch::autograd::variable_list apply_function(const Call& call, const std::array<at::Tensor, kCount>& tensors) {
  TransformsApart transforms;
  const Applied<Call> applied{call, transforms};
  return std::apply([&](const auto&... t) { return Function::apply(applied, to_optional(t)...); }, tensors);
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
