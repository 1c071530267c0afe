// What the roads through the layer have in common: which products it takes, and which heads each computes.
#pragma once

#include <c10/util/SmallVector.h>

#include "attention.h"

namespace mha_ext::layer {

inline c10::SymInt head_dim(const LayerArguments& a) {
  return a.in_proj_weight.sym_size(0) / (a.num_heads + 2 * a.num_kv_heads);
}

// Whether what rounding takes from the heads' outputs is there to be kept.
inline bool keeps_rounding(const LayerArguments& a) { return a.keep_rounding && is_half(a.query); }

// Rows [first, first + count) of the packed projection, counted in heads.
struct HeadRows {
  int64_t first;
  int64_t count;
};

// One product with the packed weight: an input, the gradient it takes part in, and the rows it is multiplied with.
struct Projection {
  const at::Tensor* input;
  HeadRows rows;
};

using Projections = c10::SmallVector<Projection, 3>;

inline Projections projections(const LayerArguments& a) {
  const int64_t h = a.num_heads, g = a.num_kv_heads;
  switch (a.shared_inputs) {
    case kSharedAll:
      return {{&a.query, {0, h + 2 * g}}};
    case kSharedKeyValue:
      return {{&a.query, {0, h}}, {&a.key, {h, 2 * g}}};
    default:
      return {{&a.query, {0, h}}, {&a.key, {h, g}}, {&a.value, {h + g, g}}};
  }
}

}  // namespace mha_ext::layer
