// Masks and dropout with keys along the lanes: the rules of mask.inl.h and dropout.inl.h, one row of pairs at a time.
#pragma once

#include "dropout.inl.h"
#include "few_rows.inl.h"

namespace mha_ext::kernels {
namespace {

// Walks over rows of a group of heads.
struct RowCursor {
  int64_t index = 0, head, query, num_queries;
  RowCursor(const AttentionParams& p, const KeyRange& range, const GroupRows& rows)
      : head(range.kv_head * (p.heads / p.kv_heads) + rows.begin / p.num_queries),
        query(rows.begin % p.num_queries),
        num_queries(p.num_queries) {}
  MHA_EXT_INLINE void next() {
    ++index;
    if (++query < num_queries) return;
    query = 0;
    ++head;
  }
};

enum class FewKind { Skip, Plain, Masked };

// One row of a tile: addends [keys], or null where nothing is hidden or added.
template <class V>
struct FewMaskRow {
  FewKind kind;
  const typename V::Scalar* addend;
};

template <class V>
struct FewMask {
  using Scalar = typename V::Scalar;
  FewMaskRow<V>* rows;
  Scalar* addends;                     // [rows][kFewKeys]
  Scalar* second;                      // [kFewKeys], of the mask that is added to another
  uint32_t *first_bits, *second_bits;  // of dropout in one head, a key each
  int64_t bits_head = -1;
  int64_t *active, active_rows = 0;  // rows that see some key of the tile
  bool hides_pairs = false;

  void take(Arena& arena, int64_t count) {
    rows = arena.take<FewMaskRow<V>>(count);
    active = arena.take<int64_t>(count);
    addends = arena.take<Scalar>(count * kFewKeys);
    second = arena.take<Scalar>(kFewKeys);
    first_bits = arena.take<uint32_t>(kFewKeys);
    second_bits = arena.take<uint32_t>(kFewKeys);
  }
};

// How many of n entries of a Bool mask hide their pair.
template <bool kContiguous>
MHA_EXT_INLINE int64_t count_hidden(const MaskView& m, int64_t offset, int64_t n) {
  const uint8_t* src = static_cast<const uint8_t*>(m.data) + offset;
  int32_t shown = 0;
  for (int64_t k = 0; k < n; ++k) shown += src[kContiguous ? k : k * m.stride_k] != 0;
  return m.true_hides ? shown : n - shown;
}

// What a mask says of n keys of a row: a Bool mask hides all, none or some.
MHA_EXT_INLINE FewKind scan_few_mask(const MaskView& m, int64_t offset, int64_t n) {
  if (m.kind == MaskKind::Float) return FewKind::Masked;
  const int64_t hidden = m.stride_k == 1 ? count_hidden<true>(m, offset, n) : count_hidden<false>(m, offset, n);
  return hidden == 0 ? FewKind::Plain : hidden == n ? FewKind::Skip : FewKind::Masked;
}

// Copies n entries of a mask as addends; returns whether any hides its pair.
template <bool kContiguous, typename Scalar>
MHA_EXT_INLINE bool read_few_addends(const MaskView& m, int64_t offset, int64_t n, Scalar* __restrict dst) {
  constexpr Scalar kHidden = -FloatFormat<Scalar>::kInfinity;
  if (m.kind == MaskKind::Bool) {
    const uint8_t* src = static_cast<const uint8_t*>(m.data) + offset;
    const Scalar if_set = m.true_hides ? kHidden : Scalar(0), if_not = m.true_hides ? Scalar(0) : kHidden;
    for (int64_t k = 0; k < n; ++k) dst[k] = src[kContiguous ? k : k * m.stride_k] != 0 ? if_set : if_not;
    return true;
  }
  const Scalar* src = static_cast<const Scalar*>(m.data) + offset;
  int32_t hidden = 0;
  for (int64_t k = 0; k < n; ++k) {
    dst[k] = src[kContiguous ? k : k * m.stride_k];
    hidden += dst[k] == kHidden;
  }
  return hidden > 0;
}

// Scores plus addends; a hidden pair becomes minus infinity even where the score is NaN.
template <class V>
void add_few_addends(typename V::Scalar* scores, const typename V::Scalar* addend, int64_t count) {
  for (int64_t k = 0; k < count; k += V::kWidth) {
    const typename V::Vec a = V::load(addend + k);
    V::store(scores + k, V::select(a == -V::kInfinity, a, V::load(scores + k) + a));
  }
}

template <class V>
FewMaskRow<V> resolve_few_row(const AttentionParams& p, int64_t batch, const RowCursor& row, const QueryBlock& tile,
                              FewMask<V>& out) {
  using Scalar = typename V::Scalar;
  const int64_t masked = max_of(0, min_of(tile.count, masked_keys(p) - tile.begin));
  const bool covers_tile = masked == tile.count;
  const KeySpan keys = keys_of_query(p, batch, row.query);
  const int64_t before = max_of(0, keys.begin - tile.begin), end = min_of(keys.end - tile.begin, masked);
  const KeySpan seen = span_of(before, end);
  if (seen.empty() && covers_tile) return {FewKind::Skip, nullptr};
  Scalar* addend = out.addends + row.index * kFewKeys;
  bool first = true;
  for (const MaskView& m : p.masks) {
    if (m.kind == MaskKind::None) continue;
    const int64_t offset =
        batch * m.stride_b + row.head * m.stride_h + row.query * m.stride_q + (tile.begin + seen.begin) * m.stride_k;
    const int64_t count = seen.end - seen.begin;
    const FewKind kind = scan_few_mask(m, offset, count);
    if (kind == FewKind::Skip && covers_tile) return {FewKind::Skip, nullptr};
    if (kind == FewKind::Plain) continue;
    Scalar* target = (first ? addend : out.second) + seen.begin;
    out.hides_pairs |= m.stride_k == 1 ? read_few_addends<true>(m, offset, count, target)
                                       : read_few_addends<false>(m, offset, count, target);
    for (int64_t k = seen.begin / V::kWidth * V::kWidth; !first && k < seen.end; k += V::kWidth) {
      V::store(addend + k, combine_addends<V>(V::load(addend + k), V::load(out.second + k)));
    }
    first = false;
  }
  const bool sees_all = seen.begin == 0 && seen.end == masked;
  if (first && sees_all) return {FewKind::Plain, nullptr};
  for (int64_t k = 0; k < seen.begin; ++k) addend[k] = -V::kInfinity;
  for (int64_t k = seen.begin; first && k < seen.end; ++k) addend[k] = 0;
  for (int64_t k = seen.end; k < masked; ++k) addend[k] = -V::kInfinity;
  for (int64_t k = masked; k < round_up(tile.count, V::kWidth); ++k) addend[k] = 0;
  out.hides_pairs |= !sees_all;
  return {FewKind::Masked, addend};
}

// Whether all masks say of a row what they said of the one before it.
MHA_EXT_INLINE bool like_row_before(const AttentionParams& p, const RowCursor& row) {
  bool alike = row.index > 0 && !p.causal && !is_bounded(p);
  for (const MaskView& m : p.masks) {
    if (m.kind != MaskKind::None) alike &= m.stride_q == 0 && (m.stride_h == 0 || row.query > 0);
  }
  return alike;
}

// Masks of a tile, row by row; false when no row sees any of its keys.
template <class V>
bool resolve_few_masks(const AttentionParams& p, const KeyRange& range, const GroupRows& rows, const QueryBlock& tile,
                       FewMask<V>& out) {
  out.hides_pairs = false;
  out.active_rows = 0;
  out.bits_head = -1;
  for (RowCursor row(p, range, rows); row.index < rows.count; row.next()) {
    out.rows[row.index] =
        like_row_before(p, row) ? out.rows[row.index - 1] : resolve_few_row<V>(p, range.batch, row, tile, out);
    if (out.rows[row.index].kind != FewKind::Skip) out.active[out.active_rows++] = row.index;
  }
  return out.active_rows > 0;
}

// The addends of all rows, each in its own place, -inf for rows that see nothing of the tile.
template <class V>
const typename V::Scalar* spread_few_addends(int64_t rows, int64_t keys, FewMask<V>& mask) {
  using Scalar = typename V::Scalar;
  for (int64_t r = rows - 1; r >= 0; --r) {  // a row may have those of one before it
    Scalar* own = mask.addends + r * kFewKeys;
    const Scalar* addend = mask.rows[r].addend;
    const Scalar alike = mask.rows[r].kind == FewKind::Skip ? -V::kInfinity : Scalar(0);
    for (int64_t k = 0; k < keys; ++k) own[k] = addend != nullptr ? addend[k] : alike;
    mask.rows[r].addend = own;
  }
  return mask.addends;
}

// Dropout's bits of a tile's keys, for all rows of a head.
template <class V>
void load_few_bits(const AttentionParams& p, int64_t batch, const RowCursor& row, const QueryBlock& tile,
                   FewMask<V>& mask) {
  if (mask.bits_head == row.head) return;
  mask.bits_head = row.head;
  const uint64_t key = dropout_key(p, batch, row.head);
  for (int64_t k = 0; k < tile.count; ++k) {
    const DropoutBits bits(key, tile.begin + k);
    mask.first_bits[k] = bits.first;
    mask.second_bits[k] = bits.second;
  }
}

// Lanes set where a query keeps keys k ... of the tile whose bits were loaded.
template <class V>
MHA_EXT_INLINE typename V::IntVec kept_keys(const AttentionParams& p, const RowCursor& row, int64_t k,
                                            const FewMask<V>& mask) {
  typename V::HashVec first, second;
  __builtin_memcpy(&first, mask.first_bits + k, sizeof(first));
  __builtin_memcpy(&second, mask.second_bits + k, sizeof(second));
  return kept_pairs<V>(typename V::HashVec{} + static_cast<uint32_t>(row.query), first, second, p.drop_below);
}

// Zeroes the probabilities of a row's dropped pairs.
template <class V>
void drop_few(const AttentionParams& p, int64_t batch, const RowCursor& row, const QueryBlock& tile,
              typename V::Scalar* probabilities, FewMask<V>& mask) {
  load_few_bits<V>(p, batch, row, tile, mask);
  for (int64_t k = 0; k < tile.count; k += V::kWidth) {
    typename V::Scalar* x = probabilities + k;
    V::store(x, V::select(kept_keys<V>(p, row, k, mask), V::load(x), V::zero()));
  }
}

}  // namespace
}  // namespace mha_ext::kernels
