// What the backward operators of attention and of the attention weights share.
#pragma once

#include "arguments.h"
#include "backward_into.h"

namespace mha_ext::cpu {

// All gradients as wanted, that of the sink without a part for dlse, from `b` with its cotangents and log-sum-exp set.
// The first three go to `targets`, of any strides; where one is undefined it is allocated.
AttentionGradients run_backward(kernels::BackwardParams& b, const AttentionArguments& args, const BoundArguments& bound,
                                const std::array<bool, kNumGradients>& wanted, const GradientTargets& targets = {});

// Their tangents.
AttentionGradients run_tangent_backward(kernels::TangentParams& m, const AttentionArguments& args,
                                        const BoundArguments& bound, const std::array<bool, kNumGradients>& wanted);

}  // namespace mha_ext::cpu
