// Backward's products by tiles of bfloat16: what they take of Q, dO and K, and of P^T and dS^T.
#pragma once

#include "tile_operands.inl.h"

namespace mha_ext::kernels {
namespace {

// Where the products of one tile of keys go: dQ^T [D][lanes], dK and dV from the tile's first key on.
struct TileSums {
  float *grad_query, *grad_key, *grad_value;
};

template <class V>
struct GradientTiles {
  BFloat16Pair *query_pairs, *grad_pairs;  // of the block, pairs of queries: [lanes / 2][D], [lanes / 2][D_v]
  BFloat16Pair* key_columns;               // of the range of keys, a tile after the other
  BFloat16Pair *key_rows, *key_pairs;      // scratch of a tile
  SplitRows probabilities, grad_scores;    // along the lanes
  SplitRows grad_score_pairs;              // along the keys

  GradientTiles(Arena& arena, const AttentionParams& p, int64_t range_keys) {
    if constexpr (!V::kMultipliesTiles) return;
    const int64_t d = padded_width<V>(p.head_dim), dv = padded_width<V>(p.value_dim);
    query_pairs = arena.take<BFloat16Pair>(kBlockQueries / 2 * d);
    grad_pairs = arena.take<BFloat16Pair>(kBlockQueries / 2 * dv);
    key_columns = arena.take<BFloat16Pair>(round_up(range_keys, kBlockKeys) / 2 * d);
    key_rows = arena.take<BFloat16Pair>(kBlockKeys * padded_width<V>(terms_in<BFloat16Pair>(p.head_dim)));
    key_pairs = arena.take<BFloat16Pair>(kBlockKeys / 2 * d);
    probabilities.take(arena, kBlockKeys / 2 * kBlockQueries);
    grad_scores.take(arena, kBlockKeys / 2 * kBlockQueries);
    grad_score_pairs.take(arena, kBlockKeys / 2 * kBlockQueries);
  }

  void load_keys(const AttentionParams& p, const KeyRange& range) const {
    const int64_t width = padded_width<V>(p.head_dim);
    for (int64_t k = range.begin; k < range.end; k += kBlockKeys) {
      const QueryBlock rows{range.batch, range.kv_head, k, min_of(kBlockKeys, range.end - k)};
      turn_keys<V, true>(kernels::key_rows<V>(p.key, rows, p.head_dim, key_rows), rows.count, width, key_pairs,
                         columns_of(k - range.begin, width));
    }
  }

  void load_queries(const AttentionParams& p, int64_t count, int64_t lanes, const float* query_rows,
                    const float* grad_rows) const {
    const int64_t padded = whole_depth(lanes);
    pair_rows<V>(query_rows, count, padded, padded_width<V>(p.head_dim), query_pairs);
    pair_rows<V>(grad_rows, count, padded, padded_width<V>(p.value_dim), grad_pairs);
  }

  // dQ^T += K^T dS^T, dK += scale dS^T Q, dV += P^T dO.
  void add_products(const AttentionParams& p, const Tile& t, const TileEdge& edge, int64_t key_in_range,
                    const float* probability_rows, const float* grad_score_rows, const TileSums& sums) const {
    const int64_t d = padded_width<V>(p.head_dim), dv = padded_width<V>(p.value_dim);
    split_key_pairs<V, Known::Nothing>(t, edge, grad_score_rows, grad_score_pairs);
    tile_key_sum<V>(t, edge, columns_of(key_in_range, d), grad_score_pairs, d, sums.grad_query);
    split_lane_pairs<V, Known::NotInfinite>(t, probability_rows, 1, probabilities);
    tile_lane_sum<V>(t, edge, probabilities, grad_pairs, dv, sums.grad_value);
    split_lane_pairs<V, Known::Nothing>(t, grad_score_rows, static_cast<float>(p.scale), grad_scores);
    tile_lane_sum<V>(t, edge, grad_scores, query_pairs, d, sums.grad_key);
  }

 private:
  BFloat16Pair* columns_of(int64_t key_in_range, int64_t width) const { return key_columns + key_in_range / 2 * width; }
};

}  // namespace
}  // namespace mha_ext::kernels
