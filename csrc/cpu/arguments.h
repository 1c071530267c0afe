// From the operators' checked arguments to the plain structs that kernels take.
#pragma once

#include "../attention.h"
#include "kernels/kernel_table.h"

namespace mha_ext::cpu {

// float64 computes in float64, every other type in float32; lse has the compute type.
at::ScalarType compute_type(const at::Tensor& query);
at::ScalarType compute_type(at::ScalarType type);
kernels::ElementType element_type(at::ScalarType type);
const kernels::KernelTable& kernels_for(at::ScalarType tensors);
const kernels::KernelTable& kernels_for(const AttentionArguments& args);

kernels::TensorView view_of(const at::Tensor& t);
kernels::MutableTensorView mutable_view_of(const at::Tensor& t);

// A relative bias as kernels read it: (B or 1, H or 1, distances and a vector of zeros), entry T_kv - 1 + i - j for the
// pair (i, j), so that the queries of a key lie side by side.
at::Tensor turned_bias(const at::Tensor& bias, at::ScalarType type);

// Kernel parameters, and what they point into: float masks in the compute type, padding as (B or 1, 1, 1, T_kv).
struct BoundArguments {
  kernels::AttentionParams params;
  at::Tensor attn_mask, key_padding_mask, mask_map, key_range, relative_bias, sink, dropout_seed;
};

BoundArguments bind(const AttentionArguments& args);

// The forward kernels' parameters without lse.
struct OutputTargets;
kernels::ForwardParams bind_outputs(const BoundArguments& bound, const OutputTargets& targets);

}  // namespace mha_ext::cpu
