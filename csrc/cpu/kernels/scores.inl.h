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
  using Scalar = typename V::Scalar;
  constexpr ElementType own = sizeof(Scalar) == 4 ? ElementType::Float32 : ElementType::Float64;
  const int64_t ld = padded_width<V>(cols);
  const bool in_place = t.type == own && t.stride_d == 1 && cols == ld && rows.count % V::kGemmRows == 0 &&
                        t.stride_t >= cols && t.stride_t <= 2 * cols;
  if (in_place) {
    return {
        static_cast<const Scalar*>(t.data) + rows.batch * t.stride_b + rows.head * t.stride_h + rows.begin * t.stride_t,
        t.stride_t};
  }
  read_rows<V>(t, rows, round_up(rows.count, V::kGemmRows), cols, Scalar(1), scratch, ld);
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
  }
};

template <class V>
void load_queries(const AttentionParams& p, const QueryBlock& block, int64_t lanes, ScoreScratch<V>& s) {
  const int64_t width = padded_width<V>(p.head_dim);
  read_rows<V>(p.query, block, lanes, p.head_dim, static_cast<typename V::Scalar>(p.scale), s.query_rows, width);
  transpose<V>(s.query_rows, width, lanes, width, s.query_columns, lanes);
}

template <class V>
struct ScoredTile {
  TileKind kind;
  Rows<typename V::Scalar> keys;
};

// S^T without the mask, whose addends are left in scratch; nothing when the tile is skipped.
template <class V>
ScoredTile<V> score_tile(const AttentionParams& p, const Tile& t, ScoreScratch<V>& s) {
  ScoredTile<V> tile{resolve_mask<V>(p, t, s.mask), {}};
  if (tile.kind == TileKind::Skip) return tile;
  tile.keys = key_rows<V>(p.key, keys_of(p, t), p.head_dim, s.keys);
  gemm<V, Lhs::ByRow, Start::Zero>(
      {tile.keys.data, tile.keys.ld, s.query_columns, t.lanes, s.scores, t.lanes, p.head_dim},
      round_up(t.key_count, V::kGemmRows), t.lanes);
  return tile;
}

// Maximum and sum over all keys, from the start.
template <class V>
void run_softmax(const AttentionParams& p, const QueryBlock& block, int64_t lanes, ScoreScratch<V>& s) {
  clear<V>(s.softmax, lanes);
  for (int64_t begin = 0; begin < p.num_keys; begin += kBlockKeys) {
    const Tile t{block, lanes, begin, min_of(kBlockKeys, p.num_keys - begin)};
    const TileKind kind = score_tile<V>(p, t, s).kind;
    if (kind == TileKind::Skip) continue;
    if (kind == TileKind::Masked) apply_mask<V>(s.scores, s.mask.addend, t.key_count * lanes);
    softmax_tile<V>(s.scores, lanes, t.key_count, lanes, s.softmax);
  }
}

// The saved log-sum-exp as high[q] + low[q], so that P = exp((S - high) - low). Rows that saw no key, and padding
// lanes, get high = +inf: their P is 0. Far from 0 a sum m + log l has lost digits of log l that P needs (beside
// finfo.min all of them): such blocks of queries find m and l again.
template <class V>
void load_lse(const void* lse, const AttentionParams& p, const QueryBlock& block, int64_t lanes, ScoreScratch<V>& s) {
  using Scalar = typename V::Scalar;
  constexpr Scalar kFar = 256;  // float: up to here the sum is exact to 2^-17, as are scores of that size
  const auto* saved =
      static_cast<const Scalar*>(lse) + (block.batch * p.heads + block.head) * p.num_queries + block.begin;
  bool far = false;
  for (int64_t q = 0; q < block.count; ++q) {
    far |= (saved[q] > kFar || saved[q] < -kFar) && __builtin_isfinite(saved[q]);
  }
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
