// What forward, backward and the weights start from: a block of queries, and S^T of a tile of keys against it.
//   S^T[k][q] = sum_d K[k][d] (scale Q)^T[d][q]          rows are keys, lanes are queries
#pragma once

#include "mask.inl.h"
#include "micro_gemm.inl.h"
#include "rows.inl.h"
#include "softmax.inl.h"

namespace mha_ext::kernels {
namespace {

// Widths of scratch rows: whole vectors, and whole blocks of the product's rows.
template <class V>
int64_t padded_width(int64_t n) {
  constexpr int64_t step = V::kWidth > V::kGemmRows ? V::kWidth : V::kGemmRows;
  static_assert(step % V::kWidth == 0 && step % V::kGemmRows == 0, "one must divide the other");
  return round_up(n, step);
}

template <typename Scalar>
struct Rows {
  const Scalar* data;
  int64_t ld;
};

// Rows of K or V for a product: read in place when they already lie as a scratch copy would, else copied.
// Rows further apart than twice their length are copied: in place, strides of a power of two compete for few cache
// sets. Prefetching V's rows, the next tile's keys and the next head's first rows was tried: within noise at T = 64 ...
// 2048.
template <class V>
Rows<typename V::Scalar> key_rows(const TensorView& t, const QueryBlock& rows, int64_t cols,
                                  typename V::Scalar* scratch) {
  const int64_t ld = padded_width<V>(cols);
  if (t.stride_t >= cols && t.stride_t <= 2 * cols) {
    if (const auto* data = rows_in_place<V>(t, rows, rows.count, cols, ld)) return {data, t.stride_t};
  }
  read_rows<V>(t, rows, rows.count, cols, typename V::Scalar(1), scratch, ld);
  return {scratch, ld};
}

template <class V>
struct ScoreScratch {
  using Scalar = typename V::Scalar;
  Scalar *query_rows, *query_columns;  // scale Q, [lanes][D] and [D][lanes]
  Scalar *keys, *scores;               // of a tile: K where it is copied, S^T
  RunningSoftmax<Scalar> softmax;
  MaskTile<Scalar> mask;

  ScoreScratch(Arena& arena, const AttentionParams& p) {
    const int64_t d = padded_width<V>(p.head_dim);
    query_rows = arena.take<Scalar>(kBlockQueries * d);
    query_columns = arena.take<Scalar>(kBlockQueries * d);
    keys = arena.take<Scalar>(kBlockKeys * d);
    scores = arena.take<Scalar>(kBlockKeys * kBlockQueries);
    softmax = {arena.take<Scalar>(kBlockQueries), arena.take<Scalar>(kBlockQueries), arena.take<Scalar>(kBlockQueries)};
    mask.addend = arena.take<Scalar>(kBlockKeys * kBlockQueries);
    mask.rows = arena.take<Scalar>(kBlockKeys * kBlockQueries);
    mask.hidden = arena.take<uint8_t>(kBlockKeys * kBlockQueries);
    mask.hidden_rows = arena.take<uint8_t>(kBlockKeys * kBlockQueries);
    mask.turned = arena.take<Scalar>(kBlockKeys * kBlockQueries);
  }
};

// (scale Q)^T; the rows are scratch.
template <class V>
void load_query_columns(const AttentionParams& p, const QueryBlock& block, int64_t lanes, ScoreScratch<V>& s) {
  read_columns<V>(p.query, block, lanes, p.head_dim, static_cast<typename V::Scalar>(p.scale), s.query_rows,
                  padded_width<V>(p.head_dim), s.query_columns);
}

template <class V>
struct ScoredTile {
  bool visible;  // else nothing was computed
  Rows<typename V::Scalar> keys;
};

template <class V>
void scale_lanes(const GemmOperands<typename V::Scalar>& g, int64_t rows, int64_t lanes) {
  for (int64_t r = 0; r < rows; ++r) {
    for (int64_t c = 0; c < lanes; c += V::kWidth) {
      auto* sum = g.c + r * g.ldc + c;
      V::store(sum, V::load(sum) * V::load(g.factor + c));
    }
  }
}

// The products of a tile, less what lies beyond its edge:
// rows are keys and columns lanes, S^T = K Q^T and dP^T = V dO^T;
template <class V>
void pair_product(const Tile& t, const TileEdge& edge, const GemmOperands<typename V::Scalar>& g) {
  if (!edge.cuts) return gemm<V, Lhs::ByRow, Start::Zero>(g, t.key_count, t.lanes);
  for_each_span<V>(t, edge, [&](int64_t lane, int64_t lanes, const KeySpan& keys) {
    gemm<V, Lhs::ByRow, Start::Zero>(
        {g.a + keys.begin * g.lda, g.lda, g.b + lane, g.ldb, g.c + keys.begin * g.ldc + lane, g.ldc, g.depth},
        keys.end - keys.begin, lanes);
  });
}

// sums over keys, columns are lanes, O^T += V^T P^T and dQ^T += K^T dS^T. A first piece of nothing but hidden keys
// would have scaled and rounded alone: without it that is done first;
template <class V, Start kStart>
void key_sum(const Tile& t, const TileEdge& edge, const GemmOperands<typename V::Scalar>& g, int64_t width) {
  if (!edge.cuts) return gemm<V, Lhs::ByColumn, kStart>(g, width, t.lanes);
  for_each_span<V>(t, edge, [&](int64_t lane, int64_t lanes, const KeySpan& keys) {
    GemmOperands<typename V::Scalar> part{g.a,   g.lda,    g.b + lane, g.ldb,     g.c + lane,
                                          g.ldc, keys.end, nullptr,    keys.begin};
    if constexpr (kStart == Start::Scale) {
      part.factor = g.factor + lane;
      if (keys.begin < kPartialSum) return gemm<V, Lhs::ByColumn, Start::Scale>(part, width, lanes);
      scale_lanes<V>(part, width, lanes);
    }
    gemm<V, Lhs::ByColumn, Start::Add>(part, width, lanes);
  });
}

// sums over lanes, rows are keys, dV += P^T dO and dK += dS^T Q. A few rows at a time, over the lanes that see any of
// them: scratch holds zeros where those do not see the others.
template <class V>
void lane_sum(const Tile& t, const TileEdge& edge, const GemmOperands<typename V::Scalar>& g, int64_t width) {
  if (!edge.cuts) return gemm<V, Lhs::ByRow, Start::Add>(g, t.key_count, width);
  for (int64_t k = 0; k < t.key_count; k += V::kGemmRows) {
    const int64_t rows = min_of(V::kGemmRows, t.key_count - k);
    int64_t begin = t.lanes, end = 0;
    for (int64_t c = 0; c < t.lanes; c += V::kWidth) {
      const KeySpan keys = edge.keys_seen<V>(t, c);
      if (keys.begin >= k + rows || keys.end <= k) continue;
      begin = min_of(begin, c);
      end = min_of(c + V::kWidth, g.depth);
    }
    if (begin >= end) continue;
    gemm<V, Lhs::ByRow, Start::Add>({g.a + k * g.lda, g.lda, g.b, g.ldb, g.c + k * g.ldc, g.ldc, end, nullptr, begin},
                                    rows, width);
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
  ScoredTile<V> tile{resolve_mask<V>(p, t, s.mask), {}};
  if (!tile.visible) return tile;
  tile.keys = key_rows<V>(p.key, keys_of(p, t), p.head_dim, s.keys);
  pair_product<V>(t, s.mask.edge,
                  {tile.keys.data, tile.keys.ld, s.query_columns, t.lanes, s.scores, t.lanes, p.head_dim});
  return tile;
}

// Maximum and sum over all keys, from the start.
template <class V>
void run_softmax(const AttentionParams& p, const QueryBlock& block, int64_t lanes, ScoreScratch<V>& s) {
  clear<V>(s.softmax, lanes);
  for (int64_t begin = 0; begin < p.num_keys; begin += kBlockKeys) {
    const Tile t{block, lanes, begin, min_of(kBlockKeys, p.num_keys - begin)};
    if (!score_tile<V>(p, t, s).visible) continue;
    apply_mask<V>(t, s.mask, s.scores);
    softmax_tile<V>(t, s.mask.edge, s.scores, s.softmax);
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
