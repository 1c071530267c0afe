// Forward for few queries, where most lanes would stay empty if queries were the lanes: here lanes run along the head.
//   S[r][k] = (scale Q)[r] . K[k] plus mask       products of a vector of keys, turned into one vector of sums
//   P[r][k] = exp(S - m), m and l the running maximum and sum of each row
//   O[r][:] = rescale[r] O[r][:] + sum_k P[r][k] V[k][:]
// A row is one query of one head. Rows of all heads that share a key/value head run together, so that K and V are read
// once, as they lie. A row's numbers do not depend on what rows run beside it.
// Long keys are cut into ranges, each leaving (O, m, l); they are merged in order by their log-sum-exps (the split over
// keys is that of Dao et al.'s Flash-Decoding, 2023).
#pragma once

#include "few_products.inl.h"

namespace mha_ext::kernels {
namespace {

// Whether keys are multiplied in pairs: rows of whole vectors, read in place.
template <class V>
bool multiplies_few_pairs(const AttentionParams& p) {
  const TensorView& k = p.key;
  return V::kMultipliesPairs && k.type == ElementType::BFloat16 && k.stride_d == 1 && k.stride_t % 2 == 0 &&
         p.head_dim % (2 * V::kWidth) == 0;
}

template <class V>
struct FewScratch {
  using Scalar = typename V::Scalar;
  RowVectors<V> head, value;  // of a row of Q and K, of V and O
  Scalar *queries, *keys, *values, *scores;
  typename V::Term* query_pairs = nullptr;        // Q as it is, where keys are multiplied in pairs
  Scalar *maximum, *sum, *accumulator, *out_row;  // sum: [rows][lanes]
  FewMask<V> mask;

  FewScratch(Arena& arena, const AttentionParams& p, int64_t rows) : head(p.head_dim), value(p.value_dim) {
    queries = arena.take<Scalar>(rows * head.padded());
    if (multiplies_few_pairs<V>(p)) {
      query_pairs = arena.take<typename V::Term>(rows * terms_in<typename V::Term>(p.head_dim));
    }
    keys = arena.take<Scalar>(kFewKeys * head.padded());
    values = arena.take<Scalar>(kFewKeys * value.padded());
    scores = arena.take<Scalar>(rows * kFewKeys);
    maximum = arena.take<Scalar>(rows);
    sum = arena.take<Scalar>(rows * V::kWidth);
    accumulator = arena.take<Scalar>(rows * max_of(head.padded(), value.padded()));
    out_row = arena.take<Scalar>(max_of(head.padded(), value.padded()));
    mask.take(arena, rows);
  }
};

// A sink is in the softmax once: in the first range of keys, or where all of them are run over.
template <class V>
void start_few(const AttentionParams& p, const KeyRange& range, const GroupRows& rows, bool with_sink,
               FewScratch<V>& s) {
  using Scalar = typename V::Scalar;
  const Scalar scale = static_cast<Scalar>(p.scale);
  for (RowCursor row(p, range, rows); row.index < rows.count; row.next()) {
    read_rows<V>(p.query, {range.batch, row.head, row.query, 1}, 1, p.head_dim, scale,
                 s.queries + row.index * s.head.padded(), s.head.padded());
    if constexpr (V::kMultipliesPairs) {
      const int64_t pairs = p.head_dim / 2;
      const QueryBlock one{range.batch, row.head, row.query, 1};
      if (s.query_pairs != nullptr) read_pairs(p.query, one, 1, p.head_dim, s.query_pairs + row.index * pairs, pairs);
    }
    const Scalar maximum = with_sink ? first_maximum<V>(p, range.batch, row.head) : -V::kInfinity;
    s.maximum[row.index] = maximum;
    V::store(s.sum + row.index * V::kWidth, V::zero());
    s.sum[row.index * V::kWidth] = first_sum(maximum);
  }
  __builtin_memset(s.accumulator, 0, static_cast<size_t>(rows.count * s.value.padded()) * sizeof(Scalar));
}

// One row of a tile: S -> P, running maximum and sum, the accumulator rescaled.
template <class V>
__attribute__((noinline)) void few_softmax(int64_t r, int64_t keys, const typename V::Scalar* addend,
                                           FewScratch<V>& s) {
  using Vec = typename V::Vec;
  using Scalar = typename V::Scalar;
  Scalar* scores = s.scores + r * kFewKeys;
  const int64_t padded = round_up(keys, V::kWidth);
  if (addend != nullptr) add_few_addends<V>(scores, addend, padded);
  for (int64_t k = keys; k < padded; ++k) scores[k] = -V::kInfinity;
  Vec highest = V::load(scores);
  for (int64_t k = V::kWidth; k < padded; k += V::kWidth) highest = V::max(highest, V::load(scores + k));
#pragma GCC unroll 4
  for (int lanes = 1; lanes < V::kWidth; lanes *= 2) {
    highest = V::max(V::interleave_low(highest, highest), V::interleave_high(highest, highest));
  }
  const Scalar before = s.maximum[r];
  const Scalar maximum = highest[0] > before ? highest[0] : before;
  const Vec reference = finite_reference<V>(V::broadcast(maximum));
  Vec sum = V::zero();
  for (int64_t k = 0; k < padded; k += V::kWidth) {
    const Vec p = exp_of<V>(V::load(scores + k) - reference);
    V::store(scores + k, p);
    sum += p;
  }
  if (maximum > before) {
    const Vec rescale = exp_of<V>(before - reference);
    V::store(s.sum + r * V::kWidth, V::load(s.sum + r * V::kWidth) * rescale);
    for (int64_t c = 0; c < s.value.padded(); c += V::kWidth) {
      Scalar* x = s.accumulator + r * s.value.padded() + c;
      V::store(x, V::load(x) * rescale);
    }
    s.maximum[r] = maximum;
  }
  V::store(s.sum + r * V::kWidth, V::load(s.sum + r * V::kWidth) + sum);
}

template <class V>
typename V::Scalar few_sum(const FewScratch<V>& s, int64_t r) {
  typename V::Scalar sum = 0;
  for (int i = 0; i < V::kWidth; ++i) sum += s.sum[r * V::kWidth + i];
  return sum;
}

template <class V>
void scale_few_scores(const AttentionParams& p, int64_t keys, typename V::Scalar* scores, const FewMask<V>& mask) {
  const auto scale = static_cast<typename V::Scalar>(p.scale);
  for (int64_t i = 0; i < mask.active_rows; ++i) {
    typename V::Scalar* row = scores + mask.active[i] * kFewKeys;
    for (int64_t k = 0; k < keys; k += V::kWidth) V::store(row + k, V::load(row + k) * scale);
  }
}

template <class V>
void cap_few_scores(const AttentionParams& p, int64_t keys, typename V::Scalar* scores, const FewMask<V>& mask) {
  const Softcap<V> cap(p);
  for (int64_t i = 0; i < mask.active_rows; ++i) {
    typename V::Scalar* row = scores + mask.active[i] * kFewKeys;
    for (int64_t k = 0; k < keys; k += V::kWidth) V::store(row + k, cap(V::load(row + k)));
  }
}

// Where a tile's rows of K and V lie: in the sample, or in a page.
MHA_EXT_INLINE QueryBlock place_of(const AttentionParams& p, const QueryBlock& tile) {
  if (p.pages == nullptr) return tile;
  return {p.pages[tile.batch * p.pages_stride_b + tile.begin / p.page_size], tile.head, tile.begin % p.page_size,
          tile.count};
}

// From `begin` to the end of a tile of keys that lie together.
MHA_EXT_INLINE int64_t few_tile_end(const AttentionParams& p, int64_t begin, int64_t end) {
  const int64_t most = p.pages == nullptr ? kFewKeys : min_of(kFewKeys, p.page_size - begin % p.page_size);
  return min_of(begin + most, end);
}

// K of the tile behind a tile.
MHA_EXT_INLINE ComingRows coming_keys(const AttentionParams& p, const QueryBlock& tile) {
  const QueryBlock next{tile.batch, tile.head, tile.begin + tile.count, kFewKeys};
  return next.begin < p.num_keys ? ComingRows(p.key, place_of(p, next), p.head_dim) : ComingRows();
}

// S of a tile before masks and softcap.
template <class V>
void multiply_few_keys(const AttentionParams& p, const QueryBlock& tile, int64_t rows, FewScratch<V>& s) {
  const ComingRows values(p.value, tile, p.value_dim);
  if constexpr (V::kMultipliesPairs) {
    if (s.query_pairs != nullptr) {
      const Rows<BFloat16Pair> keys{pointer_to<BFloat16Pair>(static_cast<const void*>(first_half(p.key, tile))),
                                    p.key.stride_t / 2};
      multiply_few<V>(s.query_pairs, RowVectors<V>(p.head_dim / 2), keys, tile.count, s.scores, s.mask, values);
      scale_few_scores<V>(p, tile.count, s.scores, s.mask);
      return;
    }
  }
  with_few_rows<V>(p.key, tile, p.head_dim, rows, s.keys, [&](const auto& keys) {
    multiply_few<V>(s.queries, s.head, keys, tile.count, s.scores, s.mask, values);
  });
}

// P of a tile; false when no row sees any of its keys.
template <class V>
bool weigh_few(const AttentionParams& p, const KeyRange& range, const GroupRows& rows, const QueryBlock& tile,
               FewScratch<V>& s) {
  if (!resolve_few_masks<V>(p, range, rows, tile, s.mask)) return false;
  multiply_few_keys<V>(p, place_of(p, tile), rows.count, s);
  if (p.softcap > 0) cap_few_scores<V>(p, tile.count, s.scores, s.mask);
  for (int64_t i = 0; i < s.mask.active_rows; ++i) {
    const int64_t r = s.mask.active[i];
    few_softmax<V>(r, tile.count, s.mask.rows[r].addend, s);
  }
  return true;
}

template <class V>
void forward_few_tile(const AttentionParams& p, const KeyRange& range, const GroupRows& rows, const QueryBlock& tile,
                      FewScratch<V>& s) {
  if (!weigh_few<V>(p, range, rows, tile, s)) return;
  for (RowCursor row(p, range, rows); p.dropout && row.index < rows.count; row.next()) {
    if (s.mask.rows[row.index].kind != FewKind::Skip) {
      drop_few<V>(p, range.batch, row, tile, s.scores + row.index * kFewKeys, s.mask);
    }
  }
  const QueryBlock place = place_of(p, tile);
  with_few_rows<V>(p.value, place, p.value_dim, rows.count, s.values, [&](const auto& values) {
    const bool look = s.mask.hides_pairs && few_nonfinite<V>(values, tile.count, s.value);
    const ComingRows keys = coming_keys(p, tile);
    add_few_products<V>(few_weighted<V>(s.scores, values, tile.count, look, keys), s.value, s.accumulator, s.mask);
  });
}

// out and lse of one row from O, m and l; a row that saw no key has l = 0: out 0, lse -inf.
template <class V>
void finish_few(const ForwardParams& f, const QueryBlock& row, const typename V::Scalar* accumulator,
                typename V::Scalar maximum, typename V::Scalar sum, typename V::Scalar* out_row) {
  using Scalar = typename V::Scalar;
  const AttentionParams& p = f.attention;
  const RowVectors<V> value(p.value_dim);
  Scalar* lse = static_cast<Scalar*>(f.lse) + (row.batch * p.heads + row.head) * p.num_queries + row.begin;
  *lse = sum == 0 ? -V::kInfinity : maximum + static_cast<Scalar>(__builtin_log(sum));
  const Scalar keep_scale = p.dropout ? static_cast<Scalar>(p.keep_scale) : Scalar(1);
  const Scalar factor = sum == 0 ? Scalar(0) : keep_scale / sum;
  for (int64_t slot = 0; slot < value.slots(); ++slot) {
    V::store(out_row + value.offset(slot), V::load(accumulator + slot * V::kWidth) * factor);
  }
  write_rows(f.out, row, p.value_dim, out_row, value.padded());
  if constexpr (sizeof(Scalar) == sizeof(float)) {
    if (f.rounding.data != nullptr) write_rounding(f.rounding, f.out.type, row, p.value_dim, out_row, value.padded());
  }
}

// One row of one range as it is kept until the ranges are merged: O, m, l.
template <class V>
int64_t few_partial_size(const AttentionParams& p) {
  return RowVectors<V>(p.value_dim).padded() + V::kWidth;
}

template <class V>
typename V::Scalar* few_partial(const ForwardParams& f, const QueryBlock& row, int64_t split) {
  const AttentionParams& p = f.attention;
  const int64_t index = ((split * p.batch + row.batch) * p.heads + row.head) * p.num_queries + row.begin;
  return static_cast<typename V::Scalar*>(f.partial) + index * few_partial_size<V>(p);
}

template <class V>
void leave_few(const ForwardParams& f, const KeyRange& range, const GroupRows& rows, FewScratch<V>& s) {
  using Scalar = typename V::Scalar;
  const int64_t width = s.value.padded();
  for (RowCursor row(f.attention, range, rows); row.index < rows.count; row.next()) {
    const QueryBlock one{range.batch, row.head, row.query, 1};
    const Scalar* accumulator = s.accumulator + row.index * width;
    const Scalar sum = few_sum<V>(s, row.index);
    if (f.partial == nullptr) {
      finish_few<V>(f, one, accumulator, s.maximum[row.index], sum, s.out_row);
      continue;
    }
    Scalar* partial = few_partial<V>(f, one, range.begin / f.range_keys);
    __builtin_memcpy(partial, accumulator, static_cast<size_t>(width) * sizeof(Scalar));
    partial[width] = s.maximum[row.index];
    partial[width + 1] = sum;
  }
}

template <class V>
int64_t few_rows_together(const AttentionParams& p) {
  return min_of(p.heads / p.kv_heads * p.num_queries, kFewRows);
}

template <class V>
void forward_few(const ForwardParams& f, const GroupRows& rows, const KeyRange& range, void* scratch) {
  const AttentionParams& p = f.attention;
  Arena arena(scratch);
  FewScratch<V> s(arena, p, few_rows_together<V>(p));
  start_few<V>(p, range, rows, range.begin == 0, s);
  const KeySpan seen = keys_to_visit(p, {range.batch, 0, 0, p.num_queries}, 1);
  const int64_t unseen = max_of(0, seen.begin - range.begin) / kFewKeys * kFewKeys;
  const int64_t last = min_of(range.end, seen.end);
  for (int64_t begin = range.begin + unseen, end; begin < last; begin = end) {
    end = few_tile_end(p, begin, range.end);
    forward_few_tile<V>(p, range, rows, {range.batch, range.kv_head, begin, end - begin}, s);
  }
  leave_few<V>(f, range, rows, s);
}

template <class V>
size_t forward_few_scratch_bytes(const AttentionParams& p) {
  Arena arena(nullptr);
  const FewScratch<V> counted(arena, p, few_rows_together<V>(p));
  return arena.used();
}

// One query from its ranges. A range without a visible key has m = -inf and takes no part.
template <class V>
void merge_few(const ForwardParams& f, const QueryBlock& row, int64_t ranges, void* scratch) {
  using Vec = typename V::Vec;
  using Scalar = typename V::Scalar;
  const int64_t width = RowVectors<V>(f.attention.value_dim).padded();
  Scalar* accumulator = static_cast<Scalar*>(scratch);
  Scalar maximum = -V::kInfinity, sum = 0;
  for (int64_t split = 0; split < ranges; ++split) {
    const Scalar m = few_partial<V>(f, row, split)[width];
    maximum = m > maximum ? m : maximum;
  }
  __builtin_memset(accumulator, 0, static_cast<size_t>(width) * sizeof(Scalar));
  const Vec reference = finite_reference<V>(V::broadcast(maximum));
  for (int64_t split = 0; split < ranges; ++split) {
    const Scalar* partial = few_partial<V>(f, row, split);
    const Vec factor = exp_of<V>(partial[width] - reference);
    sum += factor[0] * partial[width + 1];
    for (int64_t c = 0; c < width; c += V::kWidth) {
      V::store(accumulator + c, V::load(accumulator + c) + V::load(partial + c) * factor);
    }
  }
  finish_few<V>(f, row, accumulator, maximum, sum, accumulator + width);
}

}  // namespace
}  // namespace mha_ext::kernels
