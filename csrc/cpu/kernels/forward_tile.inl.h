// Forward: one block of queries against all keys, tile by tile (Rabe & Staats 2021; Dao et al. 2022).
//   S^T[k][q] = sum_d K[k][d] (scale Q)^T[d][q]          rows are keys, lanes are queries
//   P^T       = exp(S^T - m), m and l the running maximum and sum of each lane
//   O^T[d][q] = rescale[q] O^T[d][q] + sum_k V[k][d] P^T[k][q]
// so that maximum, sum and rescaling are lane-wise and K and V are read as they lie. O^T / l is turned once at the end.
#pragma once

#include "dropout.inl.h"
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
// Rows further apart than twice their length are copied: in place, strides of a power of two compete for few cache sets.
// Prefetching V's rows, the next tile's keys and the next head's first rows was tried: within noise at T = 64 ... 2048.
template <class V>
Rows<typename V::Scalar> key_rows(const TensorView& t, const QueryBlock& rows, int64_t cols,
                                  typename V::Scalar* scratch) {
  using Scalar = typename V::Scalar;
  constexpr ElementType own = sizeof(Scalar) == 4 ? ElementType::Float32 : ElementType::Float64;
  const int64_t ld = padded_width<V>(cols);
  const bool in_place = t.type == own && t.stride_d == 1 && cols == ld && rows.count % V::kGemmRows == 0 &&
                        t.stride_t >= cols && t.stride_t <= 2 * cols;
  if (in_place) {
    return {static_cast<const Scalar*>(t.data) + rows.batch * t.stride_b + rows.head * t.stride_h +
                rows.begin * t.stride_t,
            t.stride_t};
  }
  read_rows<V>(t, rows, round_up(rows.count, V::kGemmRows), cols, Scalar(1), scratch, ld);
  return {scratch, ld};
}

template <class V>
struct ForwardScratch {
  using Scalar = typename V::Scalar;
  Scalar *query_rows, *query_columns, *keys, *values, *scores, *accumulator;
  RunningSoftmax<Scalar> softmax;
  MaskTile<Scalar> mask;
  size_t bytes;

  ForwardScratch(const AttentionParams& p, void* base) {
    Arena arena(base);
    const int64_t d = padded_width<V>(p.head_dim), dv = padded_width<V>(p.value_dim);
    query_rows = arena.take<Scalar>(kBlockQueries * max_of(d, dv));  // later the turned output
    query_columns = arena.take<Scalar>(kBlockQueries * d);
    keys = arena.take<Scalar>(kBlockKeys * d);
    values = arena.take<Scalar>(kBlockKeys * dv);
    scores = arena.take<Scalar>(kBlockKeys * kBlockQueries);
    accumulator = arena.take<Scalar>(kBlockQueries * dv);
    softmax = {arena.take<Scalar>(kBlockQueries), arena.take<Scalar>(kBlockQueries), arena.take<Scalar>(kBlockQueries)};
    mask.addend = arena.take<Scalar>(kBlockKeys * kBlockQueries);
    mask.rows = arena.take<Scalar>(kBlockKeys * kBlockQueries);
    bytes = arena.used();
  }
};

// The saved log-sum-exp of a block. Rows that saw no key, and padding lanes, get +inf, so that exp(S - lse) is 0.
template <class V>
void load_lse(const void* lse, const AttentionParams& p, const QueryBlock& block, int64_t lanes,
              typename V::Scalar* dst) {
  const auto* src = static_cast<const typename V::Scalar*>(lse) +
                    (block.batch * p.heads + block.head) * p.num_queries + block.begin;
  for (int64_t q = 0; q < lanes; ++q) {
    dst[q] = q >= block.count || src[q] == -V::kInfinity ? V::kInfinity : src[q];
  }
}

// Zeroes the probabilities of dropped pairs; the factor 1/(1-p) of the kept ones is folded into the end.
template <class V>
void drop_probabilities(const AttentionParams& p, const Tile& t, typename V::Scalar* probabilities) {
  const uint64_t key = dropout_key(p, t.queries.batch, t.queries.head);
  for (int64_t k = 0; k < t.key_count; ++k) {
    const DropoutRow<V> row(key, t.key_begin + k);
    for (int64_t c = 0; c < t.lanes; c += V::kWidth) {
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
      typename V::Scalar sum = s.accumulator[d * t.lanes + q] * s.softmax.rescale[q];
      for (int64_t k = 0; k < t.key_count; ++k) {
        if (s.mask.addend[k * t.lanes + q] == -V::kInfinity) continue;
        sum += values.data[k * values.ld + d] * s.scores[k * t.lanes + q];
      }
      s.accumulator[d * t.lanes + q] = sum;
    }
  }
}

template <class V>
void forward_tile(const AttentionParams& p, const Tile& t, ForwardScratch<V>& s) {
  const TileKind kind = resolve_mask<V>(p, t, s.mask);
  if (kind == TileKind::Skip) return;
  const QueryBlock rows{t.queries.batch, t.queries.head / (p.heads / p.kv_heads), t.key_begin, t.key_count};
  const auto keys = key_rows<V>(p.key, rows, p.head_dim, s.keys);
  const int64_t padded_keys = round_up(t.key_count, V::kGemmRows);
  gemm<V, Lhs::ByRow, Start::Zero>(
      {keys.data, keys.ld, s.query_columns, t.lanes, s.scores, t.lanes, p.head_dim}, padded_keys, t.lanes);
  if (kind == TileKind::Masked) apply_mask<V>(s.scores, s.mask.addend, t.key_count * t.lanes);
  softmax_tile<V>(s.scores, t.lanes, t.key_count, t.lanes, s.softmax);
  if (p.dropout) drop_probabilities<V>(p, t, s.scores);

  const auto values = key_rows<V>(p.value, rows, p.value_dim, s.values);
  if (kind == TileKind::Masked && s.mask.hides_pairs) {
    // The check needs padded rows; rows read in place are whole vectors already.
    if (any_nonfinite<V>(values.data, values.ld, t.key_count, padded_width<V>(p.value_dim))) {
      accumulate_visible<V>(t, values, p.value_dim, s);
      return;
    }
  }
  gemm<V, Lhs::ByColumn, Start::Scale>({values.data, values.ld, s.scores, t.lanes, s.accumulator, t.lanes, t.key_count,
                                        s.softmax.rescale},
                                       padded_width<V>(p.value_dim), t.lanes);
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
  for (int64_t d = 0; d < width; ++d) {
    for (int64_t c = 0; c < lanes; c += V::kWidth) {
      Scalar* x = s.accumulator + d * lanes + c;
      V::store(x, V::load(x) * V::load(s.softmax.rescale + c));
    }
  }
  transpose<V>(s.accumulator, lanes, width, lanes, s.query_rows, width);
  write_rows(f.out, block, p.value_dim, s.query_rows, width);
}

template <class V>
void forward_block(const ForwardParams& f, const QueryBlock& block, void* scratch) {
  using Scalar = typename V::Scalar;
  const AttentionParams& p = f.attention;
  ForwardScratch<V> s(p, scratch);
  const int64_t lanes = round_up(block.count, V::kWidth);
  const int64_t width = padded_width<V>(p.head_dim);
  read_rows<V>(p.query, block, lanes, p.head_dim, static_cast<Scalar>(p.scale), s.query_rows, width);
  transpose<V>(s.query_rows, width, lanes, width, s.query_columns, lanes);
  for (int64_t q = 0; q < lanes; ++q) {
    s.softmax.maximum[q] = -V::kInfinity;
    s.softmax.sum[q] = 0;
  }
  __builtin_memset(s.accumulator, 0, static_cast<size_t>(padded_width<V>(p.value_dim) * lanes) * sizeof(Scalar));
  for (int64_t k = 0; k < p.num_keys; k += kBlockKeys) {
    forward_tile<V>(p, {block, lanes, k, min_of(kBlockKeys, p.num_keys - k)}, s);
  }
  finish_forward<V>(f, block, lanes, s);
}

template <class V>
size_t forward_scratch_bytes(const AttentionParams& p) {
  return ForwardScratch<V>(p, nullptr).bytes;
}

}  // namespace
}  // namespace mha_ext::kernels
