// Forward: one block of queries against all keys, tile by tile (Rabe & Staats 2021; Dao et al. 2022).
//   S^T       = K (scale Q)^T plus mask                  rows are keys, lanes are queries
//   P^T       = exp(S^T - m), m and l the running maximum and sum of each lane
//   O^T[d][q] = rescale[q] O^T[d][q] + sum_k V[k][d] P^T[k][q]
// so that maximum, sum and rescaling are lane-wise and K and V are read as they lie. O^T / l is turned once at the end.
#pragma once

#include "dropout.inl.h"
#include "scores.inl.h"
#include "tile_operands.inl.h"

namespace mha_ext::kernels {
namespace {

// V and P^T of a tile as products by tiles take them.
template <class V>
struct ValueTiles {
  BFloat16Pair *rows, *pairs, *columns;
  SplitRows probabilities;

  ValueTiles(Arena& arena, const AttentionParams& p) {
    if constexpr (!V::kMultipliesTiles) return;
    const int64_t dv = padded_width<V>(p.value_dim);
    rows = arena.take<BFloat16Pair>(kBlockKeys * padded_width<V>(terms_in<BFloat16Pair>(p.value_dim)));
    pairs = arena.take<BFloat16Pair>(kBlockKeys / 2 * dv);
    columns = arena.take<BFloat16Pair>(kBlockKeys / 2 * dv);
    probabilities.take(arena, kBlockKeys / 2 * kBlockQueries);
  }
};

template <class V>
struct ForwardScratch : ScoreScratch<V> {
  using Scalar = typename V::Scalar;
  Scalar *values, *accumulator, *out_rows;
  ValueTiles<V> tiles;

  ForwardScratch(Arena&& arena, const AttentionParams& p) : ScoreScratch<V>(arena, p), tiles(arena, p) {
    const int64_t dv = padded_width<V>(p.value_dim);
    values = arena.take<Scalar>(kBlockKeys * dv);
    accumulator = arena.take<Scalar>(kBlockQueries * dv);
    out_rows = arena.take<Scalar>(kBlockQueries * dv);
    bytes = arena.used();
  }
  size_t bytes;
};

// Zeroes the probabilities of dropped pairs; the factor 1/(1-p) of the kept ones is folded into the end.
template <class V>
void drop_probabilities(const AttentionParams& p, const Tile& t, const TileEdge& edge,
                        typename V::Scalar* probabilities) {
  const uint64_t key = dropout_key(p, t.queries.batch, t.queries.head);
  for (int64_t k = 0; k < t.key_count; ++k) {
    const DropoutRow<V> row(key, t.key_begin + k);
    for (int64_t c = 0; c < t.lanes; c += V::kWidth) {
      if (!edge.keys_seen<V>(t, c).holds(k)) continue;
      typename V::Scalar* x = probabilities + k * t.lanes + c;
      V::store(x, V::select(row.keep(t.queries.begin + c, p.drop_below), V::load(x), V::zero()));
    }
  }
}

// O^T += V^T P^T over visible pairs only: for a tile that hides pairs and holds infinities or NaN in V, where the
// plain product would make 0 * NaN of a hidden pair.
template <class V>
void accumulate_visible(const Tile& t, Rows<typename V::Scalar> values, int64_t value_dim, ForwardScratch<V>& s) {
  for (int64_t d = 0; d < value_dim; ++d) {
    for (int64_t q = 0; q < t.lanes; ++q) {
      add_visible(
          s.accumulator[d * t.lanes + q], s.softmax.rescale[q], t.key_count,
          [&](int64_t k) { return hides(s.mask, t.lanes, k, q); },
          [&](int64_t k) { return values.data[k * values.ld + d]; },
          [&](int64_t k) { return s.scores[k * t.lanes + q]; });
    }
  }
}

// O^T = rescale O^T + V^T P^T.
template <class V>
void accumulate_values(const AttentionParams& p, const Tile& t, ForwardScratch<V>& s) {
  const auto values = key_rows<V>(p.value, keys_of(p, t), p.value_dim, s.values);
  if (s.mask.hides_pairs && any_nonfinite<V>(values, t.key_count, p.value_dim)) {
    return accumulate_visible<V>(t, values, p.value_dim, s);
  }
  const GemmOperands<typename V::Scalar> g{values.data,   values.ld, s.scores,    t.lanes,
                                           s.accumulator, t.lanes,   t.key_count, s.softmax.rescale};
  key_sum<V, Start::Scale>(t, s.mask.edge, g, padded_width<V>(p.value_dim));
}

// The same by tiles.
template <class V>
void accumulate_value_tiles(const AttentionParams& p, const Tile& t, ForwardScratch<V>& s) {
  const ValueTiles<V>& tiles = s.tiles;
  const int64_t width = padded_width<V>(p.value_dim);
  const auto values = key_rows<V>(p.value, keys_of(p, t), p.value_dim, tiles.rows);
  const bool finite = !any_nonfinite<V>(values, t.key_count, terms_in<BFloat16Pair>(p.value_dim));
  finite ? turn_keys<V, false>(values, t.key_count, width, tiles.pairs, tiles.columns)
         : turn_keys<V, true>(values, t.key_count, width, tiles.pairs, tiles.columns);
  split_key_pairs<V, Known::SixteenBits>(t, s.mask.edge, s.scores, tiles.probabilities);
  if (!all_one<V>(s.softmax.rescale, t.lanes)) {
    scale_lanes<V>(s.accumulator, t.lanes, s.softmax.rescale, width, t.lanes);
  }
  tile_key_sum<V>(t, s.mask.edge, tiles.columns, tiles.probabilities, width, s.accumulator);
  if (finite) return;
  const auto number = [&](int64_t k, int64_t d) { return number_at(values, k, d); };
  for_each_nonfinite(t.key_count, p.value_dim, number, [&](int64_t k, int64_t d, float x) {
    for (int64_t q = 0; q < t.queries.count; ++q) {
      if (!hides(s.mask, t.lanes, k, q)) s.accumulator[d * t.lanes + q] += s.scores[k * t.lanes + q] * x;
    }
  });
}

// False when the tile hides every pair; nothing was done then.
template <class V>
bool forward_tile(const AttentionParams& p, const Tile& t, ForwardScratch<V>& s) {
  if (!score_tile<V>(p, t, s).visible) return false;
  apply_mask<V>(t, s.mask, s.scores);
  softmax_tile<V>(t, s.mask.edge, s.factor, s.scores, s.softmax);
  if (p.dropout) drop_probabilities<V>(p, t, s.mask.edge, s.scores);
  if constexpr (V::kMultipliesTiles) {
    accumulate_value_tiles<V>(p, t, s);
  } else {
    accumulate_values<V>(p, t, s);
  }
  return true;
}

// out = O^T / l turned back into rows, lse = m + log l. A row that saw no key has l = 0: out 0, lse -inf.
template <class V>
void finish_forward(const ForwardParams& f, const QueryBlock& block, int64_t lanes, ForwardScratch<V>& s) {
  using Scalar = typename V::Scalar;
  const AttentionParams& p = f.attention;
  const int64_t width = padded_width<V>(p.value_dim);
  const Scalar keep_scale = p.dropout ? static_cast<Scalar>(p.keep_scale) : Scalar(1);
  Scalar* lse = static_cast<Scalar*>(f.lse) + (block.batch * p.heads + block.head) * p.num_queries + block.begin;
  for (int64_t q = 0; q < block.count; ++q) {
    const Scalar sum = s.softmax.sum[q];
    lse[q] = sum == 0 ? -V::kInfinity : s.softmax.maximum[q] + static_cast<Scalar>(__builtin_log(sum));
    s.softmax.rescale[q] = sum == 0 ? Scalar(0) : keep_scale / sum;
  }
  write_columns<V>(f.out, block, lanes, p.value_dim, s.accumulator, s.out_rows, width,
                   [&](auto x, int64_t lane) { return x * V::load(s.softmax.rescale + lane); });
  if constexpr (sizeof(Scalar) == sizeof(float)) {
    if (f.rounding.data != nullptr) write_rounding(f.rounding, f.out.type, block, p.value_dim, s.out_rows, width);
  }
}

template <class V>
void forward_block(const ForwardParams& f, const QueryBlock& block, void* scratch) {
  using Scalar = typename V::Scalar;
  const AttentionParams& p = f.attention;
  ForwardScratch<V> s(Arena(scratch), p);
  const int64_t lanes = round_up(block.count, V::kWidth);
  load_query_columns<V>(p, block, lanes, s);
  clear<V>(p, block, s.softmax, lanes);
  __builtin_memset(s.accumulator, 0, static_cast<size_t>(padded_width<V>(p.value_dim) * lanes) * sizeof(Scalar));
  const KeySpan keys = keys_to_visit(p, block, kBlockKeys);
  for (int64_t k = keys.begin; k < keys.end; k += kBlockKeys) {
    forward_tile<V>(p, {block, lanes, k, min_of(kBlockKeys, p.num_keys - k)}, s);
  }
  finish_forward<V>(f, block, lanes, s);
}

template <class V>
size_t forward_scratch_bytes(const AttentionParams& p) {
  return ForwardScratch<V>(Arena(nullptr), p).bytes;
}

}  // namespace
}  // namespace mha_ext::kernels
