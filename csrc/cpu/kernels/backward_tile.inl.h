// Backward, recomputing the probabilities from the saved log-sum-exp (Dao et al. 2022):
//   P^T  = exp(S^T - lse)                       S^T = K (scale Q)^T, masked as in the forward
//   dP^T = V dO^T                               times the keep mask / (1 - p) under dropout
//   dS^T = P^T (dP^T - delta)                   delta[q] = rowsum(dO O) - dlse
//   dV  += P^T dO    dK += dS^T (scale Q)       rows are keys, lanes run along D
//   dQ^T += K^T dS^T                            lanes are queries; times scale when it is written
// Query blocks outside, key tiles inside; dK and dV of the range of keys live in scratch of the compute type.
#pragma once

#include "forward_tile.inl.h"

namespace mha_ext::kernels {
namespace {

template <class V>
struct BackwardScratch {
  using Scalar = typename V::Scalar;
  Scalar *query_rows, *query_columns, *grad_rows, *grad_columns, *out_rows;  // of the block of queries
  Scalar *lse, *delta;
  Scalar *keys, *values, *probabilities, *grad_scores;                       // of the tile
  Scalar *grad_query;                                                        // [D][lanes]
  Scalar *grad_key, *grad_value;                                             // of the range of keys
  MaskTile<Scalar> mask;
  bool finite_queries = true, finite_grads = true;
  size_t bytes;

  BackwardScratch(const AttentionParams& p, int64_t range_keys, void* base) {
    Arena arena(base);
    const int64_t d = padded_width<V>(p.head_dim), dv = padded_width<V>(p.value_dim);
    const int64_t rows = round_up(range_keys, kBlockKeys);
    query_rows = arena.take<Scalar>(kBlockQueries * d);
    query_columns = arena.take<Scalar>(kBlockQueries * d);
    grad_rows = arena.take<Scalar>(kBlockQueries * dv);
    grad_columns = arena.take<Scalar>(kBlockQueries * dv);
    out_rows = arena.take<Scalar>(kBlockQueries * max_of(d, dv));  // later dQ turned back into rows
    lse = arena.take<Scalar>(kBlockQueries);
    delta = arena.take<Scalar>(kBlockQueries);
    keys = arena.take<Scalar>(kBlockKeys * d);
    values = arena.take<Scalar>(kBlockKeys * dv);
    probabilities = arena.take<Scalar>(kBlockKeys * kBlockQueries);
    grad_scores = arena.take<Scalar>(kBlockKeys * kBlockQueries);
    grad_query = arena.take<Scalar>(kBlockQueries * d);
    grad_key = arena.take<Scalar>(rows * d);
    grad_value = arena.take<Scalar>(rows * dv);
    mask.addend = arena.take<Scalar>(kBlockKeys * kBlockQueries);
    mask.rows = arena.take<Scalar>(kBlockKeys * kBlockQueries);
    bytes = arena.used();
  }
};

// Q, dO, lse and delta of a block of queries.
template <class V>
void load_query_block(const BackwardParams& b, const QueryBlock& block, int64_t lanes, BackwardScratch<V>& s) {
  using Scalar = typename V::Scalar;
  const AttentionParams& p = b.attention;
  const int64_t d = padded_width<V>(p.head_dim), dv = padded_width<V>(p.value_dim);
  read_rows<V>(p.query, block, lanes, p.head_dim, static_cast<Scalar>(p.scale), s.query_rows, d);
  transpose<V>(s.query_rows, d, lanes, d, s.query_columns, lanes);
  if (b.grad_out.data != nullptr) {
    read_rows<V>(b.grad_out, block, lanes, p.value_dim, Scalar(1), s.grad_rows, dv);
    read_rows<V>(b.out, block, lanes, p.value_dim, Scalar(1), s.out_rows, dv);
  } else {
    __builtin_memset(s.grad_rows, 0, static_cast<size_t>(lanes * dv) * sizeof(Scalar));
    __builtin_memset(s.out_rows, 0, static_cast<size_t>(lanes * dv) * sizeof(Scalar));
  }
  transpose<V>(s.grad_rows, dv, lanes, dv, s.grad_columns, lanes);

  const int64_t row = (block.batch * p.heads + block.head) * p.num_queries + block.begin;
  const Scalar* grad_lse = b.grad_lse == nullptr ? nullptr : static_cast<const Scalar*>(b.grad_lse) + row;
  for (int64_t q = 0; q < lanes; ++q) {
    const bool real = q < block.count;
    typename V::Vec sum = V::zero();
    for (int64_t c = 0; c < dv; c += V::kWidth) {
      sum += V::load(s.grad_rows + q * dv + c) * V::load(s.out_rows + q * dv + c);
    }
    Scalar delta = 0;
    for (int i = 0; i < V::kWidth; ++i) delta += sum[i];
    s.delta[q] = real && grad_lse != nullptr ? delta - grad_lse[q] : delta;
  }
  load_lse<V>(b.lse, p, block, lanes, s.lse);
  s.finite_queries = !any_nonfinite<V>(s.query_rows, d, lanes, d);
  s.finite_grads = !any_nonfinite<V>(s.grad_rows, dv, lanes, dv);
}

// P^T and dS^T from S^T (in s.probabilities) and dP^T (in s.grad_scores).
template <class V, bool kMasked, bool kDropout>
void softmax_backward_tile(const AttentionParams& p, const Tile& t, BackwardScratch<V>& s) {
  using Vec = typename V::Vec;
  using Scalar = typename V::Scalar;
  const uint64_t key = kDropout ? dropout_key(p, t.queries.batch, t.queries.head) : 0;
  const Scalar keep_scale = static_cast<Scalar>(p.keep_scale);
  for (int64_t k = 0; k < t.key_count; ++k) {
    const DropoutRow<V> row(key, t.key_begin + k);
    for (int64_t c = 0; c < t.lanes; c += V::kWidth) {
      const int64_t at = k * t.lanes + c;
      Vec score = V::load(s.probabilities + at);
      Vec grad = V::load(s.grad_scores + at);
      const Vec addend = kMasked ? V::load(s.mask.addend + at) : V::zero();
      if (kMasked) score = V::select(addend == -V::kInfinity, addend, score + addend);
      const Vec lse = V::load(s.lse + c);
      const Vec probability = kMasked ? probability_of<V>(score, lse) : exp_of<V>(score - lse);
      Vec kept = probability;
      if (kDropout) {
        const auto keep = row.keep(t.queries.begin + c, p.drop_below);
        kept = V::select(keep, probability * keep_scale, V::zero());
        grad = V::select(keep, grad * keep_scale, V::zero());
      }
      grad = probability * (grad - V::load(s.delta + c));
      if (kMasked) grad = V::select(addend == -V::kInfinity, V::zero(), grad);
      V::store(s.probabilities + at, kept);
      V::store(s.grad_scores + at, grad);
    }
  }
}

template <typename Scalar>
struct KeyTile {
  Rows<Scalar> keys, values;
  TileKind kind;
};

// Leaves P^T (after dropout) and dS^T of the tile in scratch, unless the tile is skipped.
template <class V>
KeyTile<typename V::Scalar> score_tile(const AttentionParams& p, const Tile& t, BackwardScratch<V>& s) {
  KeyTile<typename V::Scalar> tile{};
  tile.kind = resolve_mask<V>(p, t, s.mask);
  if (tile.kind == TileKind::Skip) return tile;
  const QueryBlock rows{t.queries.batch, t.queries.head / (p.heads / p.kv_heads), t.key_begin, t.key_count};
  tile.keys = key_rows<V>(p.key, rows, p.head_dim, s.keys);
  tile.values = key_rows<V>(p.value, rows, p.value_dim, s.values);
  const int64_t padded_keys = round_up(t.key_count, V::kGemmRows);
  gemm<V, Lhs::ByRow, Start::Zero>(
      {tile.keys.data, tile.keys.ld, s.query_columns, t.lanes, s.probabilities, t.lanes, p.head_dim}, padded_keys,
      t.lanes);
  gemm<V, Lhs::ByRow, Start::Zero>(
      {tile.values.data, tile.values.ld, s.grad_columns, t.lanes, s.grad_scores, t.lanes, p.value_dim}, padded_keys,
      t.lanes);
  if (tile.kind == TileKind::Masked) {
    p.dropout ? softmax_backward_tile<V, true, true>(p, t, s) : softmax_backward_tile<V, true, false>(p, t, s);
  } else {
    p.dropout ? softmax_backward_tile<V, false, true>(p, t, s) : softmax_backward_tile<V, false, false>(p, t, s);
  }
  return tile;
}

// dQ, dK, dV of one tile over visible pairs only, for a tile that hides pairs and meets infinities or NaN.
template <class V>
void accumulate_visible_gradients(const AttentionParams& p, const Tile& t, const KeyTile<typename V::Scalar>& tile,
                                  typename V::Scalar* grad_key, typename V::Scalar* grad_value,
                                  BackwardScratch<V>& s) {
  const int64_t d_width = padded_width<V>(p.head_dim), dv_width = padded_width<V>(p.value_dim);
  for (int64_t k = 0; k < t.key_count; ++k) {
    for (int64_t q = 0; q < t.queries.count; ++q) {
      const int64_t at = k * t.lanes + q;
      if (s.mask.addend[at] == -V::kInfinity) continue;
      for (int64_t d = 0; d < p.head_dim; ++d) {
        s.grad_query[d * t.lanes + q] += tile.keys.data[k * tile.keys.ld + d] * s.grad_scores[at];
        grad_key[k * d_width + d] += s.grad_scores[at] * s.query_rows[q * d_width + d];
      }
      for (int64_t d = 0; d < p.value_dim; ++d) {
        grad_value[k * dv_width + d] += s.probabilities[at] * s.grad_rows[q * dv_width + d];
      }
    }
  }
}

template <class V>
void backward_tile(const AttentionParams& p, const Tile& t, int64_t key_in_range, BackwardScratch<V>& s) {
  using Scalar = typename V::Scalar;
  const KeyTile<Scalar> tile = score_tile<V>(p, t, s);
  if (tile.kind == TileKind::Skip) return;
  const int64_t d = padded_width<V>(p.head_dim), dv = padded_width<V>(p.value_dim);
  Scalar* grad_key = s.grad_key + key_in_range * d;
  Scalar* grad_value = s.grad_value + key_in_range * dv;
  if (tile.kind == TileKind::Masked && s.mask.hides_pairs) {
    if (!s.finite_queries || !s.finite_grads || any_nonfinite<V>(tile.keys.data, tile.keys.ld, t.key_count, d)) {
      accumulate_visible_gradients<V>(p, t, tile, grad_key, grad_value, s);
      return;
    }
  }
  const int64_t padded_keys = round_up(t.key_count, V::kGemmRows);
  gemm<V, Lhs::ByColumn, Start::Add>(
      {tile.keys.data, tile.keys.ld, s.grad_scores, t.lanes, s.grad_query, t.lanes, t.key_count}, d, t.lanes);
  gemm<V, Lhs::ByRow, Start::Add>({s.probabilities, t.lanes, s.grad_rows, dv, grad_value, dv, t.queries.count},
                                  padded_keys, dv);
  gemm<V, Lhs::ByRow, Start::Add>({s.grad_scores, t.lanes, s.query_rows, d, grad_key, d, t.queries.count},
                                  padded_keys, d);
}

template <class V>
void write_grad_query(const BackwardParams& b, const QueryBlock& block, int64_t lanes, int64_t split,
                      BackwardScratch<V>& s) {
  using Scalar = typename V::Scalar;
  const AttentionParams& p = b.attention;
  const int64_t width = padded_width<V>(p.head_dim);
  const Scalar scale = static_cast<Scalar>(p.scale);
  for (int64_t i = 0; i < width * lanes; i += V::kWidth) V::store(s.grad_query + i, V::load(s.grad_query + i) * scale);
  transpose<V>(s.grad_query, lanes, width, lanes, s.out_rows, width);
  if (b.grad_query_partial == nullptr) {
    write_rows(b.grad_query, block, p.head_dim, s.out_rows, width);
    return;
  }
  MutableTensorView partial;
  partial.type = sizeof(Scalar) == 4 ? ElementType::Float32 : ElementType::Float64;
  partial.stride_d = 1;
  partial.stride_t = p.head_dim;
  partial.stride_h = p.num_queries * partial.stride_t;
  partial.stride_b = p.heads * partial.stride_h;
  partial.data = static_cast<Scalar*>(b.grad_query_partial) + split * p.batch * partial.stride_b;
  write_rows(partial, block, p.head_dim, s.out_rows, width);
}

template <class V>
void backward_range(const BackwardParams& b, const KeyRange& range, void* scratch) {
  using Scalar = typename V::Scalar;
  const AttentionParams& p = b.attention;
  const int64_t count = range.end - range.begin;
  BackwardScratch<V> s(p, count, scratch);
  const int64_t d = padded_width<V>(p.head_dim), dv = padded_width<V>(p.value_dim);
  __builtin_memset(s.grad_key, 0, static_cast<size_t>(count * d) * sizeof(Scalar));
  __builtin_memset(s.grad_value, 0, static_cast<size_t>(count * dv) * sizeof(Scalar));
  const int64_t group = p.heads / p.kv_heads;
  for (int64_t head = range.kv_head * group; head < (range.kv_head + 1) * group; ++head) {
    for (int64_t q = 0; q < p.num_queries; q += p.query_block) {
      const QueryBlock block{range.batch, head, q, min_of(p.query_block, p.num_queries - q)};
      const int64_t lanes = round_up(block.count, V::kWidth);
      load_query_block<V>(b, block, lanes, s);
      __builtin_memset(s.grad_query, 0, static_cast<size_t>(d * lanes) * sizeof(Scalar));
      for (int64_t k = range.begin; k < range.end; k += kBlockKeys) {
        backward_tile<V>(p, {block, lanes, k, min_of(kBlockKeys, range.end - k)}, k - range.begin, s);
      }
      if (b.grad_query.data != nullptr || b.grad_query_partial != nullptr) {
        write_grad_query<V>(b, block, lanes, range.split, s);
      }
    }
  }
  const QueryBlock rows{range.batch, range.kv_head, range.begin, count};
  if (b.grad_key.data != nullptr) write_rows(b.grad_key, rows, p.head_dim, s.grad_key, d);
  if (b.grad_value.data != nullptr) write_rows(b.grad_value, rows, p.value_dim, s.grad_value, dv);
}

template <class V>
size_t backward_scratch_bytes(const AttentionParams& p, int64_t range_keys) {
  return BackwardScratch<V>(p, range_keys, nullptr).bytes;
}

// d(mask) = dS summed over the axes along which the mask is broadcast.
template <class V>
void mask_gradient_block(const BackwardParams& b, const QueryBlock& block, int64_t key_begin, int64_t key_end,
                         const MaskGradientView& out, void* scratch) {
  using Scalar = typename V::Scalar;
  const AttentionParams& p = b.attention;
  BackwardScratch<V> s(p, 0, scratch);
  const int64_t lanes = round_up(block.count, V::kWidth);
  load_query_block<V>(b, block, lanes, s);
  Scalar* base = static_cast<Scalar*>(out.data) + block.batch * out.stride_b + block.head * out.stride_h +
                 block.begin * out.stride_q;
  for (int64_t begin = key_begin; begin < key_end; begin += kBlockKeys) {
    const Tile t{block, lanes, begin, min_of(kBlockKeys, key_end - begin)};
    if (score_tile<V>(p, t, s).kind == TileKind::Skip) continue;
    for (int64_t q = 0; q < block.count; ++q) {
      Scalar* row = base + q * out.stride_q + begin * out.stride_k;
      for (int64_t k = 0; k < t.key_count; ++k) row[k * out.stride_k] += s.grad_scores[k * lanes + q];
    }
  }
}

template <class V>
size_t mask_gradient_scratch_bytes(const AttentionParams& p) {
  return BackwardScratch<V>(p, 0, nullptr).bytes;
}

}  // namespace
}  // namespace mha_ext::kernels
