// Backward for few queries, lanes along the head (backward_tile.inl.h has the equations):
//   P, dP, dS [r][k]    products of rows as in the forward
//   dQ[r][:] += sum_k dS[r][k] K[k][:]
//   dV[k][:]  = sum_r P[r][k] dO[r][:],   dK[k][:] = sum_r dS[r][k] (scale Q)[r][:]
// All rows of a group of heads run together, so that a tile of dK and dV is complete when it is left: it is written
// where it belongs, and K and V are read once.
#pragma once

#include "few_queries.inl.h"

namespace mha_ext::kernels {
namespace {

template <class V>
struct FewBackwardScratch : FewScratch<V> {
  using Scalar = typename V::Scalar;
  Scalar *grads, *grad_scores, *low, *delta;  // dO and dS; the log-sum-exp is maximum + low
  Scalar *grad_key, *grad_value;              // of a tile
  bool finite_rows = true;

  FewBackwardScratch(Arena& arena, const AttentionParams& p, int64_t rows) : FewScratch<V>(arena, p, rows) {
    grads = arena.take<Scalar>(rows * this->value.padded());
    grad_scores = arena.take<Scalar>(rows * kFewKeys);
    low = arena.take<Scalar>(rows);
    delta = arena.take<Scalar>(rows);
    grad_key = arena.take<Scalar>(kFewKeys * this->head.padded());
    grad_value = arena.take<Scalar>(kFewKeys * this->value.padded());
  }
};

// load_lse for rows: P = exp((S - maximum) - low).
template <class V>
void load_few_lse(const BackwardParams& b, const KeyRange& range, const GroupRows& rows, FewBackwardScratch<V>& s) {
  using Scalar = typename V::Scalar;
  const AttentionParams& p = b.attention;
  const auto* saved = static_cast<const Scalar*>(b.lse) +
                      (range.batch * p.heads + range.kv_head * (p.heads / p.kv_heads)) * p.num_queries + rows.begin;
  const bool far = any_far(saved, rows.count);
  if (far) {
    for (int64_t begin = 0; begin < p.num_keys; begin += kFewKeys) {
      weigh_few<V>(p, range, rows, {range.batch, range.kv_head, begin, min_of(kFewKeys, p.num_keys - begin)}, s);
    }
  }
  for (int64_t r = 0; r < rows.count; ++r) {
    const bool sees_nothing = saved[r] == -V::kInfinity;
    s.low[r] = sees_nothing || !far ? Scalar(0) : static_cast<Scalar>(__builtin_log(few_sum<V>(s, r)));
    s.maximum[r] = sees_nothing ? V::kInfinity : far ? s.maximum[r] : saved[r];
  }
}

// Q, dO, delta and the log-sum-exp of all rows.
template <class V>
void load_few_rows(const BackwardParams& b, const KeyRange& range, const GroupRows& rows, FewBackwardScratch<V>& s) {
  using Scalar = typename V::Scalar;
  const AttentionParams& p = b.attention;
  const int64_t width = s.value.padded();
  start_few<V>(p, range, rows, /*with_sink=*/true, s);
  for (RowCursor row(p, range, rows); row.index < rows.count; row.next()) {
    const QueryBlock one{range.batch, row.head, row.query, 1};
    Scalar* grad = s.grads + row.index * width;
    Scalar delta = 0;
    if (b.grad_out.data == nullptr) {
      __builtin_memset(grad, 0, static_cast<size_t>(width) * sizeof(Scalar));
    } else {
      read_rows<V>(b.grad_out, one, 1, p.value_dim, Scalar(1), grad, width);
      read_output<V>(b, one, 1, s.out_row, width);
      typename V::Vec sum = V::zero();
      for (int64_t c = 0; c < width; c += V::kWidth) sum += V::load(grad + c) * V::load(s.out_row + c);
      for (int i = 0; i < V::kWidth; ++i) delta += sum[i];
    }
    const auto* grad_lse = static_cast<const Scalar*>(b.grad_lse);
    const int64_t at = (range.batch * p.heads + row.head) * p.num_queries + row.query;
    s.delta[row.index] = grad_lse == nullptr ? delta : delta - grad_lse[at];
  }
  load_few_lse<V>(b, range, rows, s);
  s.finite_rows = !any_nonfinite<V>(Rows<Scalar>{s.queries, s.head.padded()}, rows.count, s.head.padded()) &&
                  !any_nonfinite<V>(Rows<Scalar>{s.grads, width}, rows.count, width);
  __builtin_memset(s.accumulator, 0, static_cast<size_t>(rows.count * s.head.padded()) * sizeof(Scalar));
}

// S -> P (after dropout) and dP -> dS of one row of a tile.
template <class V, bool kMasked, bool kDropout>
void few_softmax_backward(const AttentionParams& p, const RowCursor& row, int64_t keys, FewBackwardScratch<V>& s) {
  using Vec = typename V::Vec;
  using Scalar = typename V::Scalar;
  const int64_t r = row.index;
  const Vec high = V::broadcast(s.maximum[r]), low = V::broadcast(s.low[r]), delta = V::broadcast(s.delta[r]);
  const Scalar keep_scale = static_cast<Scalar>(p.keep_scale);
  const Softcap<V> cap(p);
  for (int64_t k = 0; k < keys; k += V::kWidth) {
    const int64_t at = r * kFewKeys + k;
    Vec score = V::load(s.scores + at), grad = V::load(s.grad_scores + at);
    const Vec addend = kMasked ? V::load(s.mask.rows[r].addend + k) : V::zero();
    if (kMasked) score = V::select(addend == -V::kInfinity, addend, score + addend);
    const Vec probability = probability_of<V, kMasked>(score, high, low);
    Vec kept = probability;
    if (kDropout) {
      const auto keep = kept_keys<V>(p, row, k, s.mask);
      kept = V::select(keep, probability * keep_scale, V::zero());
      grad = V::select(keep, grad * keep_scale, V::zero());
    }
    grad = probability * (grad - delta);
    if (p.softcap > 0) grad *= cap.slope(V::load(s.scores + at));
    if (kMasked) grad = V::select(addend == -V::kInfinity, V::zero(), grad);
    V::store(s.scores + at, kept);
    V::store(s.grad_scores + at, grad);
  }
}

template <class V>
void few_gradient_scores(const AttentionParams& p, const KeyRange& range, const GroupRows& rows, const QueryBlock& tile,
                         FewBackwardScratch<V>& s) {
  using Scalar = typename V::Scalar;
  for (RowCursor row(p, range, rows); row.index < rows.count; row.next()) {
    const FewMaskRow<V>& mask = s.mask.rows[row.index];
    if (mask.kind == FewKind::Skip) {
      __builtin_memset(s.scores + row.index * kFewKeys, 0, kFewKeys * sizeof(Scalar));
      __builtin_memset(s.grad_scores + row.index * kFewKeys, 0, kFewKeys * sizeof(Scalar));
      continue;
    }
    if (p.dropout) load_few_bits<V>(p, range.batch, row, tile, s.mask);
    if (mask.addend != nullptr) {
      p.dropout ? few_softmax_backward<V, true, true>(p, row, tile.count, s)
                : few_softmax_backward<V, true, false>(p, row, tile.count, s);
    } else {
      p.dropout ? few_softmax_backward<V, false, true>(p, row, tile.count, s)
                : few_softmax_backward<V, false, false>(p, row, tile.count, s);
    }
  }
}

// A tile of dK or dV: weights[r][k] and rows [r]. Where vectors can be written as they lie, straight into `out`.
template <class V>
struct FewColumnSums {
  const typename V::Scalar *weights, *rows;
  int64_t count;                      // of rows
  const typename V::Scalar* addends;  // [r][k], or null: leave out hidden pairs
  const RowVectors<V>& columns;
};

template <class V, int kOwn, bool kLook>
__attribute__((noinline)) void few_column_sums(const FewColumnSums<V>& g, int64_t key, typename V::Scalar* out,
                                               int64_t ld) {
  FewPointers<typename V::Scalar> weights;
  typename V::Scalar* sums[kFewTogether];
#pragma GCC unroll 4
  for (int j = 0; j < kOwn; ++j) {
    weights[j] = g.weights + key + j;
    sums[j] = out + (key + j) * ld;
  }
  const auto* addend = kLook ? g.addends + key : nullptr;
  const WeightedRows<V> rows{{g.rows, g.columns.padded()}, g.count, addend, kFewKeys};
  add_weighted<V, Sums::Fresh, kOwn, kLook>(rows, weights, g.columns, sums);
}

template <class V>
void write_few_columns(const FewColumnSums<V>& g, const MutableTensorView& t, const QueryBlock& tile, int64_t cols,
                       typename V::Scalar* scratch) {
  using Scalar = typename V::Scalar;
  const bool in_place = t.type == kTypeOf<Scalar> && t.stride_d == 1 && cols >= V::kWidth;
  Scalar* out = in_place ? static_cast<Scalar*>(t.data) + tile.batch * t.stride_b + tile.head * t.stride_h +
                               tile.begin * t.stride_t
                         : scratch;
  const int64_t ld = in_place ? t.stride_t : g.columns.padded();
  int64_t k = 0;
  for (; g.addends != nullptr && k < tile.count; ++k) few_column_sums<V, 1, true>(g, k, out, ld);
  for (; k + 3 <= tile.count; k += 3) few_column_sums<V, 3, false>(g, k, out, ld);
  for (; k < tile.count; ++k) few_column_sums<V, 1, false>(g, k, out, ld);
  if (!in_place) write_rows(t, tile, cols, scratch, ld);
}

template <class V>
void few_backward_tile(const BackwardParams& b, const KeyRange& range, const GroupRows& rows, const QueryBlock& tile,
                       FewBackwardScratch<V>& s) {
  const AttentionParams& p = b.attention;
  const typename V::Scalar* addends = nullptr;
  int64_t count = 0;  // rows that take part
  if (resolve_few_masks<V>(p, range, rows, tile, s.mask)) {
    count = rows.count;
    const auto keys = few_rows<V>(p.key, tile, p.head_dim, true, s.keys);
    const auto values = few_rows<V>(p.value, tile, p.value_dim, true, s.values);
    multiply_few<V>(s.queries, s.head, keys, tile.count, s.scores, s.mask);
    if (p.softcap > 0) cap_few_scores<V>(p, tile.count, s.scores, s.mask);
    multiply_few<V>(s.grads, s.value, values, tile.count, s.grad_scores, s.mask);
    few_gradient_scores<V>(p, range, rows, tile, s);
    const bool hides = s.mask.hides_pairs || s.mask.active_rows < rows.count;
    if (hides && (!s.finite_rows || few_nonfinite<V>(keys, tile.count, s.head))) {
      addends = spread_few_addends<V>(rows.count, tile.count, s.mask);
    }
    if (b.grad_query.data != nullptr || b.grad_query_shares != nullptr) {
      add_few_products<V>(few_weighted<V>(s.grad_scores, keys, tile.count, addends != nullptr), s.head, s.accumulator,
                          s.mask);
    }
  }
  if (b.grad_key.data != nullptr) {
    write_few_columns<V>({s.grad_scores, s.queries, count, addends, s.head}, b.grad_key, tile, p.head_dim, s.grad_key);
  }
  if (b.grad_value.data != nullptr) {
    write_few_columns<V>({s.scores, s.grads, count, addends, s.value}, b.grad_value, tile, p.value_dim, s.grad_value);
  }
}

// dQ, or the range's share of it before it is scaled.
template <class V>
void write_few_grad_query(const BackwardParams& b, const KeyRange& range, const GroupRows& rows,
                          FewBackwardScratch<V>& s) {
  using Scalar = typename V::Scalar;
  const AttentionParams& p = b.attention;
  const bool shares = b.grad_query_shares != nullptr;
  MutableTensorView target = b.grad_query;
  if (shares) {
    const int64_t head = p.num_queries * p.head_dim, batch = p.heads * head;
    target = {static_cast<Scalar*>(b.grad_query_shares) + range.begin / b.range_keys * p.batch * batch,
              kTypeOf<Scalar>,
              batch,
              head,
              p.head_dim,
              1};
  }
  if (target.data == nullptr) return;
  const Scalar scale = shares ? Scalar(1) : static_cast<Scalar>(p.scale);
  for (RowCursor row(p, range, rows); row.index < rows.count; row.next()) {
    for (int64_t slot = 0; slot < s.head.slots(); ++slot) {
      V::store(s.grad_key + s.head.offset(slot),
               V::load(s.accumulator + row.index * s.head.padded() + slot * V::kWidth) * scale);
    }
    write_rows(target, {range.batch, row.head, row.query, 1}, p.head_dim, s.grad_key, s.head.padded());
  }
}

template <class V>
void backward_few(const BackwardParams& b, const KeyRange& range, void* scratch) {
  const AttentionParams& p = b.attention;
  const GroupRows rows{0, p.heads / p.kv_heads * p.num_queries};
  Arena arena(scratch);
  FewBackwardScratch<V> s(arena, p, rows.count);
  load_few_rows<V>(b, range, rows, s);
  for (int64_t begin = range.begin; begin < range.end; begin += kFewKeys) {
    few_backward_tile<V>(b, range, rows, {range.batch, range.kv_head, begin, min_of(kFewKeys, range.end - begin)}, s);
  }
  write_few_grad_query<V>(b, range, rows, s);
}

template <class V>
size_t backward_few_scratch_bytes(const AttentionParams& p) {
  Arena arena(nullptr);
  const FewBackwardScratch<V> counted(arena, p, p.heads / p.kv_heads * p.num_queries);
  return arena.used();
}

}  // namespace
}  // namespace mha_ext::kernels
