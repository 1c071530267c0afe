// Autocast, for the one other place that must know of it: vmap takes operators apart before autocast sees them.
#pragma once

#include "attention.h"

namespace mha_ext {

bool autocast_is_active(const at::Tensor& query);

// Cast, switch autocast off and call the operator.
AttentionResult attention_autocast(const AttentionArguments& arguments);
WeightsResult attention_with_weights_autocast(const AttentionArguments& arguments, bool average);
LayerResult multi_head_attention_autocast(const LayerArguments& arguments);

// fast_linear of the tensors in the lower precision.
std::optional<at::Tensor> fast_linear_autocast(at::Tensor input, at::Tensor weight, at::Tensor bias);

}  // namespace mha_ext
