// Attention into a tensor of the caller's, for those who promise a layout of their own.
#pragma once

#include "../attention.h"

namespace mha_ext::cpu {

// (B, H, T_q, D_v), of any strides: the output, and what rounding took from it (bfloat16) unless that is undefined or
// empty.
struct OutputTargets {
  at::Tensor out, rounding = {};
};

// CPU tensors, checked. Writes all of the targets; returns lse (B, H, T_q), contiguous.
at::Tensor attention_into(const AttentionArguments& args, const OutputTargets& targets);

// The same, with the weights: lse, and (B, T_q, T_kv) averaged over heads or (B, H, T_q, T_kv), contiguous.
std::tuple<at::Tensor, at::Tensor> attention_with_weights_into(const AttentionArguments& args, bool average,
                                                               const OutputTargets& targets);

}  // namespace mha_ext::cpu
