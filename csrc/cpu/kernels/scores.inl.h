// What forward, backward and the weights start from: a block of queries, and S^T of a tile of keys against it.
//   S^T[k][q] = sum_d K[k][d] (scale Q)^T[d][q]          rows are keys, lanes are queries
#pragma once

#include "mask.inl.h"
#include "softcap.inl.h"
#include "terms.inl.h"

namespace mha_ext::kernels {
namespace {

template <class V>
struct ScoreScratch {
  using Scalar = typename V::Scalar;
  using Term = typename V::Term;
  Scalar* query_rows;   // scale Q, [lanes][D]
  Term* query_columns;  // [D][lanes]: the same, or Q in pairs
  Term* keys;           // of a tile, where K is copied
  Scalar* scores;       // of a tile: S^T
  Scalar factor = 1;    // what the scores of the tile lack
  RunningSoftmax<Scalar> softmax;
  MaskTile<Scalar> mask;

  ScoreScratch(Arena& arena, const AttentionParams& p) {
    const int64_t terms = padded_width<V>(terms_in<Term>(p.head_dim));
    query_rows = arena.take<Scalar>(kBlockQueries * padded_width<V>(p.head_dim));
    query_columns = arena.take<Term>(kBlockQueries * terms);
    keys = arena.take<Term>(kBlockKeys * terms);
    scores = arena.take<Scalar>(kBlockKeys * kBlockQueries);
    softmax = {arena.take<Scalar>(kBlockQueries), arena.take<Scalar>(kBlockQueries), arena.take<Scalar>(kBlockQueries)};
    mask.addend = arena.take<Scalar>(kBlockKeys * kBlockQueries);
    mask.rows = arena.take<Scalar>(kBlockKeys * kBlockQueries);
    mask.hidden = arena.take<uint8_t>(kBlockKeys * kBlockQueries);
    mask.hidden_rows = arena.take<uint8_t>(kBlockKeys * kBlockQueries);
    mask.turned = arena.take<Scalar>(kBlockKeys * kBlockQueries);
  }
};

// (scale Q)^T, or Q^T in pairs; the rows are scratch.
template <class V>
void load_query_columns(const AttentionParams& p, const QueryBlock& block, int64_t lanes, ScoreScratch<V>& s) {
  if constexpr (V::kMultipliesPairs) {
    read_pair_columns<V>(p.query, block, lanes, p.head_dim, s.query_rows, s.query_columns);
  } else {
    read_columns<V>(p.query, block, lanes, p.head_dim, static_cast<typename V::Scalar>(p.scale), s.query_rows,
                    padded_width<V>(p.head_dim), s.query_columns);
  }
}

template <class V>
struct ScoredTile {
  bool visible;  // else nothing was computed
  Rows<typename V::Term> keys;
};

template <class V>
bool all_one(const typename V::Scalar* factors, int64_t lanes) {
  typename V::IntVec differs{};
  for (int64_t c = 0; c < lanes; c += V::kWidth) differs |= V::load(factors + c) != V::broadcast(1);
  return !V::any(differs);
}

// Rows times one factor a lane.
template <class V>
void scale_lanes(typename V::Scalar* rows, int64_t ld, const typename V::Scalar* factor, int64_t count, int64_t lanes) {
  for (int64_t r = 0; r < count; ++r, rows += ld) {
    for (int64_t c = 0; c < lanes; c += V::kWidth) V::store(rows + c, V::load(rows + c) * V::load(factor + c));
  }
}

// S^T or dP^T where an instruction multiplies tiles: rows of keys are read in whole tiles, and written so.
template <class V>
void tile_pair_product(const Tile& t, const TileEdge& edge, const GemmOperands<float, BFloat16Pair>& g) {
  for_each_span<V>(t, edge, [&](int64_t lane, int64_t lanes, const KeySpan& keys) {
    const int64_t begin = keys.begin / kTileRows * kTileRows, rows = round_up(keys.end, kTileRows) - begin;
    float* sums = g.c + begin * g.ldc + lane;
    const TileOperands part{g.a + begin * g.lda, g.lda, g.b + lane, g.ldb, sums, g.ldc, round_up(g.depth, kTilePairs)};
    tile_product<V, Split::None, Start::Zero>(part, rows, lanes);
    for (int64_t k = 0; k < rows && g.times != 1; ++k) {
      for (int64_t c = 0; c < lanes; c += V::kWidth)
        V::store(sums + k * g.ldc + c, V::load(sums + k * g.ldc + c) * g.times);
    }
  });
}

// The products of a tile, less what lies beyond its edge:
// rows are keys and columns lanes, S^T = K Q^T and dP^T = V dO^T;
template <class V, Start kStart = Start::Zero, typename Term>
void pair_product(const Tile& t, const TileEdge& edge, const GemmOperands<typename V::Scalar, Term>& g) {
  if constexpr (V::kMultipliesTiles) {
    tile_pair_product<V>(t, edge, g);
  } else if (edge.cuts) {
    for_each_span<V>(t, edge, [&](int64_t lane, int64_t lanes, const KeySpan& keys) {
      GemmOperands<typename V::Scalar, Term> part = g;
      part.a += keys.begin * g.lda, part.b += lane, part.c += keys.begin * g.ldc + lane;
      gemm<V, Lhs::ByRow, kStart>(part, keys.end - keys.begin, lanes);
    });
  } else {
    gemm<V, Lhs::ByRow, kStart>(g, t.key_count, t.lanes);
  }
}

// sums over keys, columns are lanes, O^T += V^T P^T and dQ^T += K^T dS^T. A first piece of nothing but hidden keys
// would have scaled and rounded alone: without it that is done first;
template <class V, Start kStart, typename Term>
void key_sum(const Tile& t, const TileEdge& edge, const GemmOperands<typename V::Scalar, Term>& g, int64_t width) {
  if (!edge.cuts) return gemm<V, Lhs::ByColumn, kStart>(g, width, t.lanes);
  for_each_span<V>(t, edge, [&](int64_t lane, int64_t lanes, const KeySpan& keys) {
    GemmOperands<typename V::Scalar, Term> part = g;
    part.b += lane, part.c += lane;
    part.begin = keys.begin / kNumbersIn<Term>, part.depth = terms_in<Term>(keys.end);
    if constexpr (kStart == Start::Scale) {
      part.factor = g.factor + lane;
      if (keys.begin < kPartialSum) return gemm<V, Lhs::ByColumn, Start::Scale>(part, width, lanes);
      scale_lanes<V>(part.c, part.ldc, part.factor, width, lanes);
    }
    gemm<V, Lhs::ByColumn, Start::Add>(part, width, lanes);
  });
}

// sums over lanes, rows are keys, dV += P^T dO and dK += dS^T Q. A few rows at a time, over the lanes that see any of
// them: scratch holds zeros where those do not see the others.
template <class V, typename Term>
void lane_sum(const Tile& t, const TileEdge& edge, const GemmOperands<typename V::Scalar, Term>& g, int64_t width) {
  constexpr int64_t kNumbers = kNumbersIn<Term>;
  if (!edge.cuts) return gemm<V, Lhs::ByRow, Start::Add>(g, t.key_count, width);
  for (int64_t k = 0; k < t.key_count; k += V::kGemmRows) {
    const int64_t rows = min_of(V::kGemmRows, t.key_count - k);
    int64_t begin = t.lanes, end = 0;
    for (int64_t c = 0; c < t.lanes; c += V::kWidth) {
      const KeySpan keys = edge.keys_seen<V>(t, c);
      if (keys.begin >= k + rows || keys.end <= k) continue;
      begin = min_of(begin, c / kNumbers);
      end = min_of((c + V::kWidth) / kNumbers, g.depth);
    }
    if (begin >= end) continue;
    GemmOperands<typename V::Scalar, Term> part = g;
    part.a += k * g.lda, part.c += k * g.ldc, part.begin = begin, part.depth = end;
    gemm<V, Lhs::ByRow, Start::Add>(part, rows, width);
  }
}

// The same sums one by one, without hidden pairs and rounded alike: total * factor + sum over i < count of a(i) * b(i).
template <typename Scalar, class Hidden, class A, class B>
MHA_EXT_INLINE void add_visible(Scalar& total, Scalar factor, int64_t count, const Hidden& hidden, const A& a,
                                const B& b) {
  for (int64_t i = 0; i < count; factor = 1) {
    Scalar sum = 0;
    for (const int64_t end = min_of(partial_sum_end(i), count); i < end; ++i) {
      if (!hidden(i)) sum += a(i) * b(i);
    }
    total = total * factor + sum;
  }
}

// S^T before the mask, which is left in scratch; nothing when no pair is visible.
template <class V>
ScoredTile<V> score_tile(const AttentionParams& p, const Tile& t, ScoreScratch<V>& s) {
  using Term = typename V::Term;
  ScoredTile<V> tile{resolve_mask<V>(p, t, s.mask), {}};
  if (!tile.visible) return tile;
  tile.keys = key_rows<V>(p.key, keys_of(p, t), p.head_dim, s.keys);
  GemmOperands<typename V::Scalar, Term> g{tile.keys.data, tile.keys.ld, s.query_columns,           t.lanes,
                                           s.scores,       t.lanes,      terms_in<Term>(p.head_dim)};
  g.times = static_cast<typename V::Scalar>(p.scale);
  if (V::kMultipliesTiles) {
    const bool later = g.times > 0 && !s.mask.has_addends && p.softcap == 0;
    s.factor = later ? g.times : 1;
    if (later) g.times = 1;
  }
  pair_product<V>(t, s.mask.edge, g);
  if (p.softcap > 0) cap_scores<V>(p, t, s.mask.edge, s.scores);
  return tile;
}

// Maximum and sum over all keys, from the start.
template <class V>
void run_softmax(const AttentionParams& p, const QueryBlock& block, int64_t lanes, ScoreScratch<V>& s) {
  clear<V>(p, block, s.softmax, lanes);
  const KeySpan keys = keys_to_visit(p, block, kBlockKeys);
  for (int64_t begin = keys.begin; begin < keys.end; begin += kBlockKeys) {
    const Tile t{block, lanes, begin, min_of(kBlockKeys, p.num_keys - begin)};
    if (!score_tile<V>(p, t, s).visible) continue;
    apply_mask<V>(t, s.mask, s.scores);
    softmax_tile<V>(t, s.mask.edge, s.factor, s.scores, s.softmax);
  }
}

// Whether a saved log-sum-exp m + log l is so far from 0 that it has lost digits of log l that P needs (beside
// finfo.min all of them): m and l are then found again.
template <typename Scalar>
bool any_far(const Scalar* lse, int64_t count) {
  constexpr Scalar kFar = 256;  // float: up to here the sum is exact to 2^-17, as are scores of that size
  bool far = false;
  for (int64_t q = 0; q < count; ++q) far |= (lse[q] > kFar || lse[q] < -kFar) && __builtin_isfinite(lse[q]);
  return far;
}

// The saved log-sum-exp as high[q] + low[q], so that P = exp((S - high) - low). Rows that saw no key, and padding
// lanes, get high = +inf: their P is 0.
template <class V>
void load_lse(const void* lse, const AttentionParams& p, const QueryBlock& block, int64_t lanes, ScoreScratch<V>& s) {
  using Scalar = typename V::Scalar;
  const auto* saved =
      static_cast<const Scalar*>(lse) + (block.batch * p.heads + block.head) * p.num_queries + block.begin;
  const bool far = any_far(saved, block.count);
  if (far) run_softmax<V>(p, block, lanes, s);
  Scalar *high = s.softmax.maximum, *low = s.softmax.sum;
  for (int64_t q = 0; q < lanes; ++q) {
    const bool sees_nothing = q >= block.count || saved[q] == -V::kInfinity;
    high[q] = sees_nothing ? V::kInfinity : far ? high[q] : saved[q];
    low[q] = sees_nothing || !far ? Scalar(0) : static_cast<Scalar>(__builtin_log(low[q]));
  }
}

}  // namespace
}  // namespace mha_ext::kernels
