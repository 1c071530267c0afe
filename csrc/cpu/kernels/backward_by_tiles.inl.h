// dQ, dK and dV of one tile of keys where an instruction multiplies tiles of bfloat16.
#pragma once

#include "backward_tile.inl.h"

namespace mha_ext::kernels {
namespace {

template <class V>
void backward_tile_by_tiles(const BackwardParams& b, const Tile& t, int64_t key_in_range, BackwardScratch<V>& s) {
  const AttentionParams& p = b.attention;
  const ScoredTile<V> tile = score_gradient_tile<V>(b, t, s);
  if (!tile.visible) return;
  const int64_t d_width = padded_width<V>(p.head_dim), dv_width = padded_width<V>(p.value_dim);
  const TileSums sums{s.grad_query, s.grad_key + key_in_range * d_width, s.grad_value + key_in_range * dv_width};
  s.tiles.add_products(p, t, s.mask.edge, key_in_range, s.scores, s.grad_scores, sums);
  const auto add_to_row = [&](float* rows, int64_t width, const float* pairs) {
    return [=, &s, &t](int64_t q, int64_t c, float x) {
      for (int64_t k = 0; k < t.key_count; ++k) {
        if (!hides(s.mask, t.lanes, k, q)) rows[k * width + c] += pairs[k * t.lanes + q] * x;
      }
    };
  };
  if (!block_is_finite<V>(p, t.lanes, s)) {
    for_each_nonfinite(
        t.queries.count, p.head_dim,
        [&](int64_t q, int64_t d) { return s.query_rows[q * d_width + d] * static_cast<float>(p.scale); },
        add_to_row(sums.grad_key, d_width, s.grad_scores));
    for_each_nonfinite(
        t.queries.count, p.value_dim, [&](int64_t q, int64_t d) { return s.grad_rows[q * dv_width + d]; },
        add_to_row(sums.grad_value, dv_width, s.scores));
  }
  if (any_nonfinite<V>(tile.keys, t.key_count, terms_in<BFloat16Pair>(p.head_dim))) {
    for_each_nonfinite(
        t.key_count, p.head_dim, [&](int64_t k, int64_t d) { return number_at(tile.keys, k, d); },
        [&](int64_t k, int64_t d, float x) {
          for (int64_t q = 0; q < t.queries.count; ++q) {
            if (hides(s.mask, t.lanes, k, q)) continue;
            s.grad_query[d * t.lanes + q] += s.grad_scores[k * t.lanes + q] * x;
          }
        });
  }
}

}  // namespace
}  // namespace mha_ext::kernels
