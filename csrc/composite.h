// The operators as compositions of ATen operators. They serve devices without kernels of their own, function transforms
// (vmap, jvp, ...) and, in closed form and re-derived from the inputs, the derivatives of the backward operators.
#pragma once

#include "attention.h"

namespace mha_ext {

AttentionResult attention_math(const AttentionArguments& arguments);
AttentionGradients attention_backward_math(const AttentionArguments& arguments, const AttentionCotangents& cotangents);

// With `average` one head after the other, so that no (B, H, T_q, T_kv) tensor is held.
at::Tensor attention_weights_math(const AttentionArguments& arguments, const at::Tensor& lse, bool average);
// The same as a differentiable function of the inputs, `lse` unread.
at::Tensor attention_weights_from_inputs(const AttentionArguments& arguments, const at::Tensor& lse, bool average);
WeightsGradients attention_weights_backward_math(const AttentionArguments& arguments,
                                                 const WeightsCotangents& cotangents);

// The layer: linear operators and our attention operators on views of the projections.
LayerResult multi_head_attention_composed(const LayerArguments& arguments);
LayerGradients multi_head_attention_backward_composed(const LayerArguments& arguments,
                                                      const LayerCotangents& cotangents);
// The same without relying on what the forward saved, so that it can be differentiated.
LayerGradients multi_head_attention_backward_from_inputs(const LayerArguments& arguments,
                                                         const LayerCotangents& cotangents);

}  // namespace mha_ext
