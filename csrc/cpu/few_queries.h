// Attention for few queries on CPU: keys are cut into ranges, so that one head with a long cache uses all threads.
#pragma once

#include "arguments.h"

namespace mha_ext::cpu {

// Writes out and lse of `forward`, whose attention has queries, heads and a batch; `options` of a tensor of the compute
// type.
void attend_few(kernels::ForwardParams& forward, const kernels::KernelTable& kernel, const at::TensorOptions& options);

}  // namespace mha_ext::cpu
