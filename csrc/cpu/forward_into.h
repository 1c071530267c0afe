// Attention into a tensor of the caller's, for those who promise a layout of their own.
#pragma once

#include "../attention.h"

namespace mha_ext::cpu {

// CPU tensors, checked. Writes all of out (B, H, T_q, D_v), of any strides; returns lse (B, H, T_q), contiguous.
at::Tensor attention_into(const AttentionArguments& args, const at::Tensor& out);

// The same, with the weights: lse, and (B, T_q, T_kv) averaged over heads or (B, H, T_q, T_kv), contiguous.
std::tuple<at::Tensor, at::Tensor> attention_with_weights_into(const AttentionArguments& args, bool average,
                                                               const at::Tensor& out);

}  // namespace mha_ext::cpu
