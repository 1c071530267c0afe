// Projections and attention run in autocast's lower precision, as linear and scaled_dot_product_attention do. Masks and
// the log-sum-exp keep their dtype.
#include "autocast.h"

#include <ATen/autocast_mode.h>
#include <torch/library.h>

#include "linear.h"
#include "signatures.h"

namespace mha_ext {
namespace {

c10::DispatchKey autocast_key(c10::DeviceType device) {
  return at::autocast::get_autocast_dispatch_key_from_device_type(device);
}

// Casts, and switches autocast off for its lifetime.
class Autocast {
 public:
  explicit Autocast(const at::Tensor& query)
      : device_(query.device().type()),
        dtype_(at::autocast::get_autocast_dtype(device_)),
        guard_(c10::DispatchKeySet(autocast_key(device_))) {}

  void operator()(at::Tensor& tensor) const {
    if (tensor.defined()) tensor = at::autocast::cached_cast(dtype_, tensor, device_);
  }

 private:
  c10::DeviceType device_;
  at::ScalarType dtype_;
  c10::impl::ExcludeDispatchKeyGuard guard_;
};

}  // namespace

bool autocast_is_active(const at::Tensor& query) {
  const c10::DeviceType device = query.device().type();
  return at::autocast::is_autocast_available(device) && at::autocast::is_autocast_enabled(device) &&
         !c10::impl::tls_is_dispatch_key_excluded(autocast_key(device));
}

AttentionResult attention_autocast(const AttentionArguments& a) {
  const Autocast cast(a.query);
  AttentionArguments lower = a;
  for (at::Tensor* tensor : {&lower.query, &lower.key, &lower.value}) cast(*tensor);
  return call_attention(lower);
}

std::optional<at::Tensor> fast_linear_autocast(at::Tensor input, at::Tensor weight, at::Tensor bias) {
  const Autocast cast(input);
  for (at::Tensor* tensor : {&input, &weight, &bias}) cast(*tensor);
  return fast_linear(input, weight, bias);
}

WeightsResult attention_with_weights_autocast(const AttentionArguments& a, bool average) {
  const Autocast cast(a.query);
  AttentionArguments lower = a;
  for (at::Tensor* tensor : {&lower.query, &lower.key, &lower.value}) cast(*tensor);
  return call_attention_with_weights(lower, average);
}

LayerResult multi_head_attention_autocast(const LayerArguments& a) {
  const Autocast cast(a.query);
  LayerArguments lower = a;
  for (at::Tensor* tensor : {&lower.query, &lower.key, &lower.value, &lower.in_proj_weight, &lower.in_proj_bias,
                             &lower.out_proj_weight, &lower.out_proj_bias}) {
    cast(*tensor);
  }
  return call_multi_head_attention(lower);
}

namespace {

void register_autocast(torch::Library& m) {
  m.impl("attention", TORCH_FN(attention_kernel<attention_autocast>));
  m.impl("attention_with_weights", TORCH_FN(attention_with_weights_kernel<attention_with_weights_autocast>));
  m.impl("multi_head_attention", TORCH_FN(multi_head_attention_kernel<multi_head_attention_autocast>));
}

}  // namespace

TORCH_LIBRARY_IMPL(mha_ext, AutocastCPU, m) { register_autocast(m); }
TORCH_LIBRARY_IMPL(mha_ext, AutocastCUDA, m) { register_autocast(m); }

}  // namespace mha_ext
