// The operators as compositions of ATen operators. They serve devices without kernels of their own, function transforms
// (vmap, jvp, ...) and, in closed form and re-derived from the inputs, the derivatives of the backward operators.
#pragma once

#include "attention.h"

namespace mha_ext {

AttentionResult attention_math(const AttentionArguments& arguments);
AttentionGradients attention_backward_math(const AttentionArguments& arguments, const AttentionCotangents& cotangents);

AttentionResult paged_attention_math(const PagedArguments& arguments);

WeightsResult attention_with_weights_math(const AttentionArguments& arguments, bool average);
ForBackwardResult attention_for_backward_math(const AttentionArguments& arguments, int64_t weights);
// One head after the other, so that the pair tensors of one head are held at a time.
WeightsGradients attention_weights_backward_math(const AttentionArguments& arguments,
                                                 const WeightsCotangents& cotangents);

// Derivatives along tangents: all pairs at once, to be differentiated in their turn,
AttentionResult attention_jvp_math(const AttentionArguments& arguments, const ForwardTangents& tangents);
SecondGradients attention_backward_jvp_math(const AttentionArguments& arguments, const BackwardTangents& tangents);
// and block by block, in memory linear in T.
AttentionResult attention_jvp_tiled(const AttentionArguments& arguments, const ForwardTangents& tangents);
SecondGradients attention_backward_jvp_tiled(const AttentionArguments& arguments, const BackwardTangents& tangents);

// The layer: linear operators and our attention operators on views of the projections.
LayerResult multi_head_attention_composed(const LayerArguments& arguments);
LayerGradients multi_head_attention_backward_composed(const LayerArguments& arguments,
                                                      const LayerCotangents& cotangents);
// Its steps one after the other, each an operator of its own: the output and the attention weights.
AttentionResult multi_head_attention_with_weights(const LayerArguments& arguments, bool average);
// The same, to be differentiated by autograd or a transform: the state comes out detached, and the backward does not
// rely on it.
LayerResult multi_head_attention_differentiable(const LayerArguments& arguments);
LayerGradients multi_head_attention_backward_from_inputs(const LayerArguments& arguments,
                                                         const LayerCotangents& cotangents);

}  // namespace mha_ext
