// Backward of attention into tensors of the caller's, for the layer, whose projections share one gradient.
#pragma once

#include "../attention.h"

namespace mha_ext::cpu {

struct GradientTargets {
  at::Tensor query, key, value;
};

// CPU tensors, checked. Gradients of query, key and value go to their targets, of any strides, where there are some.
AttentionGradients attention_backward_into(const AttentionArguments& args, const AttentionCotangents& cotangents,
                                           const GradientTargets& targets);

}  // namespace mha_ext::cpu
