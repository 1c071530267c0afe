#include "linear.h"

#include <ATen/ops/linear.h>
#include <ATen/ops/mm.h>
#include <c10/core/impl/TorchDispatchModeTLS.h>
#include <torch/csrc/autograd/custom_function.h>

#include <algorithm>

#include "attention.h"
#include "autocast.h"
#include "cpu/products.h"
#include "differentiation.h"

namespace mha_ext {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

at::Tensor flat_rows(const at::Tensor& tensor) { return tensor.reshape({-1, tensor.size(-1)}); }

class FastLinear : public torch::autograd::Function<FastLinear> {
 public:
  static at::Tensor forward(AutogradContext* context, const at::Tensor& input, const at::Tensor& weight,
                            const OptionalTensor& bias) {
    const at::AutoDispatchBelowADInplaceOrView guard;
    context->save_for_backward({input, weight, bias.value_or(at::Tensor())});
    return cpu::fast_linear(input, weight, bias);
  }

  static variable_list backward(AutogradContext* context, const variable_list& grads) {
    const variable_list saved = context->get_saved_variables();
    const at::Tensor &input = saved[0], &weight = saved[1], grad = flat_rows(grads[0]);
    const auto wanted = wanted_gradients<3>(context, {input, weight, saved[2]});
    const std::array<at::Tensor, 3> factors{grad, weight, input};
    const bool on_cpu = !at::GradMode::is_enabled() && runs_on_cpu_alone(factors);
    variable_list result(3);
    if (wanted[0]) result[0] = (on_cpu ? cpu::product(grad, weight) : at::mm(grad, weight)).reshape(input.sizes());
    if (wanted[1]) {
      const at::Tensor rows = flat_rows(input);
      result[1] = on_cpu ? cpu::transposed_product(grad, rows) : at::mm(grad.t(), rows);
    }
    if (wanted[2]) result[2] = grad.sum(0);
    return result;
  }
};

// Memory holds what the tensor says: no bit for a sign or a conjugate is set, zeros are there, and it wraps no other
// tensor (which it may outside of any transform, too).
bool is_plain(const at::Tensor& t) {
  if (!t.defined()) return true;
  constexpr c10::DispatchKeySet kOthers(
      {c10::DispatchKey::Python, c10::DispatchKey::Negative, c10::DispatchKey::Conjugate, c10::DispatchKey::ZeroTensor,
       c10::DispatchKey::Functionalize, c10::DispatchKey::FuncTorchBatched, c10::DispatchKey::FuncTorchGradWrapper});
  return t.layout() == at::kStrided && t.key_set().has(c10::DispatchKey::CPU) && !t.key_set().has_any(kOthers) &&
         !t._fw_grad(/*level=*/0).defined();
}

// But for autocast.
bool are_plain(at::ArrayRef<at::Tensor> tensors) {
  return !transform_is_active() && !c10::impl::dispatch_mode_enabled() &&
         std::all_of(tensors.begin(), tensors.end(), is_plain);
}

}  // namespace

bool runs_on_cpu_alone(at::ArrayRef<at::Tensor> tensors) {
  return !autocast_is_active(tensors.front()) && are_plain(tensors);
}

std::optional<at::Tensor> fast_linear(const at::Tensor& input, const at::Tensor& weight, const at::Tensor& bias) {
  const std::array<at::Tensor, 3> tensors{input, weight, bias};
  if (!are_plain(tensors)) return std::nullopt;
  if (autocast_is_active(input)) return fast_linear_autocast(input, weight, bias);
  if (!cpu::has_fast_linear(input, weight, to_optional(bias))) return std::nullopt;
  return FastLinear::apply(input, weight, to_optional(bias));
}

at::Tensor linear(const at::Tensor& input, const at::Tensor& weight, const at::Tensor& bias) {
  const std::optional<at::Tensor> out = fast_linear(input, weight, bias);
  return out.has_value() ? *out : at::linear(input, weight, to_optional(bias));
}

}  // namespace mha_ext
