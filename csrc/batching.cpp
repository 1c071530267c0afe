// vmap: the ATen compositions, whose operators have batching rules of their own.
#include <torch/library.h>

#include "composite.h"
#include "signatures.h"

namespace mha_ext {

TORCH_LIBRARY_IMPL(mha_ext, FuncTorchBatched, m) {
  m.impl("attention", TORCH_FN(attention_kernel<attention_math>));
  m.impl("attention_backward", TORCH_FN(attention_backward_kernel<attention_backward_math>));
  m.impl("attention_weights", TORCH_FN(attention_weights_kernel<attention_weights_from_inputs>));
  m.impl("attention_weights_backward", TORCH_FN(attention_weights_backward_kernel<attention_weights_backward_math>));
  m.impl("multi_head_attention", TORCH_FN(multi_head_attention_kernel<multi_head_attention_composed>));
  m.impl("multi_head_attention_backward",
         TORCH_FN(multi_head_attention_backward_kernel<multi_head_attention_backward_composed>));
}

}  // namespace mha_ext
