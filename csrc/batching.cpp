// vmap: the ATen compositions, whose operators have batching rules of their own.
#include <torch/library.h>

#include "autocast.h"
#include "composite.h"
#include "signatures.h"

namespace mha_ext {
namespace {

AttentionResult attention_batched(const AttentionArguments& a) {
  return autocast_is_active(a.query) ? attention_autocast(a) : attention_math(a);
}

WeightsResult attention_with_weights_batched(const AttentionArguments& a, bool average) {
  if (autocast_is_active(a.query)) return attention_with_weights_autocast(a, average);
  return attention_with_weights_math(a, average);
}

LayerResult multi_head_attention_batched(const LayerArguments& a) {
  return autocast_is_active(a.query) ? multi_head_attention_autocast(a) : multi_head_attention_differentiable(a);
}

}  // namespace

TORCH_LIBRARY_IMPL(mha_ext, FuncTorchBatched, m) {
  m.impl("attention", TORCH_FN(attention_kernel<attention_batched>));
  m.impl("attention_backward", TORCH_FN(attention_backward_kernel<attention_backward_math>));
  m.impl("attention_with_weights", TORCH_FN(attention_with_weights_kernel<attention_with_weights_batched>));
  m.impl("attention_for_backward", TORCH_FN(attention_for_backward_kernel<attention_for_backward_math>));
  m.impl("attention_weights_backward", TORCH_FN(attention_weights_backward_kernel<attention_weights_backward_math>));
  m.impl("multi_head_attention", TORCH_FN(multi_head_attention_kernel<multi_head_attention_batched>));
  m.impl("multi_head_attention_backward",
         TORCH_FN(multi_head_attention_backward_kernel<multi_head_attention_backward_from_inputs>));
}

}  // namespace mha_ext
