// Autocast: projections and attention run in autocast's lower precision, as linear and scaled_dot_product_attention do.
// Masks and the log-sum-exp keep their dtype.
#include <ATen/autocast_mode.h>
#include <torch/library.h>

#include "signatures.h"

namespace mha_ext {
namespace {

// Casts for one device, and switches autocast off for its lifetime.
template <c10::DeviceType kDevice>
class Autocast {
 public:
  at::Tensor operator()(const at::Tensor& tensor) const {
    return tensor.defined() ? at::autocast::cached_cast(dtype_, tensor, kDevice) : tensor;
  }

 private:
  at::ScalarType dtype_ = at::autocast::get_autocast_dtype(kDevice);
  c10::impl::ExcludeDispatchKeyGuard guard_{
      c10::DispatchKeySet(at::autocast::get_autocast_dispatch_key_from_device_type(kDevice))};
};

template <c10::DeviceType kDevice>
AttentionResult attention_autocast(const AttentionArguments& a) {
  const Autocast<kDevice> cast;
  AttentionArguments lower = a;
  lower.query = cast(a.query), lower.key = cast(a.key), lower.value = cast(a.value);
  return call_attention(lower);
}

template <c10::DeviceType kDevice>
at::Tensor attention_weights_autocast(const AttentionArguments& a, const at::Tensor& lse, bool average) {
  const Autocast<kDevice> cast;
  AttentionArguments lower = a;
  lower.query = cast(a.query), lower.key = cast(a.key);
  return call_attention_weights(lower, lse, average);
}

template <c10::DeviceType kDevice>
LayerResult multi_head_attention_autocast(const LayerArguments& a) {
  const Autocast<kDevice> cast;
  LayerArguments lower = a;
  for (at::Tensor LayerArguments::*member :
       {&LayerArguments::query, &LayerArguments::key, &LayerArguments::value, &LayerArguments::in_proj_weight,
        &LayerArguments::in_proj_bias, &LayerArguments::out_proj_weight, &LayerArguments::out_proj_bias}) {
    lower.*member = cast(a.*member);
  }
  return call_multi_head_attention(lower);
}

template <c10::DeviceType kDevice>
void register_autocast(torch::Library& m) {
  m.impl("attention", TORCH_FN(attention_kernel<attention_autocast<kDevice>>));
  m.impl("attention_weights", TORCH_FN(attention_weights_kernel<attention_weights_autocast<kDevice>>));
  m.impl("multi_head_attention", TORCH_FN(multi_head_attention_kernel<multi_head_attention_autocast<kDevice>>));
}

}  // namespace

TORCH_LIBRARY_IMPL(mha_ext, AutocastCPU, m) { register_autocast<at::kCPU>(m); }
TORCH_LIBRARY_IMPL(mha_ext, AutocastCUDA, m) { register_autocast<at::kCUDA>(m); }

}  // namespace mha_ext
