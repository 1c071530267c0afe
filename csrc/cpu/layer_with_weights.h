// The layer with its attention weights, for callers who need no derivatives and have no other say in the call.
#pragma once

#include "../attention.h"

namespace mha_ext::cpu {

// CPU tensors, checked. The output, and the weights averaged over heads or per head.
AttentionResult layer_with_weights(const LayerArguments& arguments, bool average);

}  // namespace mha_ext::cpu
