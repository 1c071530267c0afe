// The operators' contract. Every kernel that computes (CPU, Meta, ATen composition) checks here, on symbolic sizes,
// before anything else, so that an error has the same words on every road.
#pragma once

#include "attention.h"

namespace mha_ext {

// `function` starts the message. A value that is absent is not checked.
void check_attention(const char* function, const AttentionArguments& arguments);
void check_attention_for_backward(const AttentionArguments& arguments, int64_t weights);
void check_attention_backward(const AttentionArguments& arguments, const AttentionCotangents& cotangents);
void check_attention_jvp(const AttentionArguments& arguments, const ForwardTangents& tangents);
void check_attention_backward_jvp(const AttentionArguments& arguments, const BackwardTangents& tangents);
void check_attention_weights_backward(const AttentionArguments& arguments, const WeightsCotangents& cotangents);
void check_paged_attention(const PagedArguments& arguments);
void check_layer(const LayerArguments& arguments);
void check_layer_backward(const LayerArguments& arguments, const LayerCotangents& cotangents);

}  // namespace mha_ext
