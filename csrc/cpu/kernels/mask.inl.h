// Which pairs of a tile are hidden, and what is added to the scores of the others. Causal order, a mask and padding
// are resolved together, once a tile: a tile is skipped, or runs as if there were no mask, or carries a block of
// addends [key][query] in which minus infinity hides a pair. Only the last kind pays.
#pragma once

#include "params.h"
#include "rows.inl.h"
#include "simd.inl.h"

namespace mha_ext::kernels {
namespace {

enum class TileKind { Skip, Plain, Masked };

struct Tile {
  QueryBlock queries;
  int64_t lanes;  // queries.count padded to whole vectors
  int64_t key_begin, key_count;
};

// The tile's rows of K and V.
MHA_EXT_INLINE QueryBlock keys_of(const AttentionParams& p, const Tile& t) {
  return {t.queries.batch, t.queries.head / (p.heads / p.kv_heads), t.key_begin, t.key_count};
}

template <typename Scalar>
struct MaskTile {
  Scalar* addend;  // [key_count][lanes]
  Scalar* rows;    // [kBlockQueries][kBlockKeys], a mask as it lies before it is turned
  bool hides_pairs = false;
};

// How many of n entries of a Bool mask hide their pair.
template <bool kContiguous>
MHA_EXT_INLINE int64_t count_hidden(const MaskView& m, int64_t offset, int64_t n) {
  const uint8_t* src = static_cast<const uint8_t*>(m.data) + offset;
  int32_t shown = 0;
  for (int64_t k = 0; k < n; ++k) shown += src[kContiguous ? k : k * m.stride_k] != 0;
  return m.true_hides ? shown : n - shown;
}

// Copies n entries of a mask as addends; returns whether any hides its pair. Of a Bool mask only regions that do are
// copied (scan_mask).
template <bool kContiguous, typename Scalar>
MHA_EXT_INLINE bool mask_addends(const MaskView& m, int64_t offset, int64_t n, Scalar* __restrict dst) {
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

// a + b, except that a hidden pair stays hidden whatever the other addend is, and that two finite addends hide nothing.
template <class V>
MHA_EXT_INLINE typename V::Vec combine_addends(typename V::Vec a, typename V::Vec b) {
  const typename V::Vec sum = a + b;
  const typename V::Vec finite = V::select(sum == -V::kInfinity, V::broadcast(V::Format::kLowest), sum);
  return V::select(b == -V::kInfinity, b, V::select(a == -V::kInfinity, a, finite));
}

// The part of a tile that one mask covers, as it lies: `rows` rows (one, where all queries have the same), from
// `offset`.
struct MaskRegion {
  int64_t offset, rows, keys;
};

// What a Bool mask says of its region without a look at each pair.
MHA_EXT_INLINE TileKind scan_mask(const MaskView& m, const MaskRegion& r) {
  if (m.kind == MaskKind::Float) return TileKind::Masked;
  int64_t hidden = 0;
  for (int64_t q = 0; q < r.rows; ++q) {
    const int64_t offset = r.offset + q * m.stride_q;
    hidden += m.stride_k == 1 ? count_hidden<true>(m, offset, r.keys) : count_hidden<false>(m, offset, r.keys);
  }
  return hidden == 0 ? TileKind::Plain : hidden == r.rows * r.keys ? TileKind::Skip : TileKind::Masked;
}

// Adds one mask to the tile's addends, or puts it in their place while there are none (`first`).
template <class V>
void add_mask(const MaskView& m, const Tile& t, const MaskRegion& r, bool first, MaskTile<typename V::Scalar>& out) {
  using Scalar = typename V::Scalar;
  for (int64_t q = 0; q < r.rows; ++q) {
    const int64_t offset = r.offset + q * m.stride_q;
    Scalar* row = out.rows + q * kBlockKeys;
    out.hides_pairs |=
        m.stride_k == 1 ? mask_addends<true>(m, offset, r.keys, row) : mask_addends<false>(m, offset, r.keys, row);
  }
  alignas(64) Scalar turned[kBlockKeys * V::kWidth];
  for (int64_t c = 0; c < t.lanes; c += V::kWidth) {
    if (m.stride_q != 0) {
      transpose<V>(out.rows + c * kBlockKeys, kBlockKeys, V::kWidth, round_up(r.keys, V::kWidth), turned, V::kWidth);
    }
    for (int64_t k = 0; k < r.keys; ++k) {
      const auto addend = m.stride_q != 0 ? V::load(turned + k * V::kWidth) : V::broadcast(out.rows[k]);
      Scalar* dst = out.addend + k * t.lanes + c;
      V::store(dst, first ? addend : combine_addends<V>(V::load(dst), addend));
    }
  }
}

// Hides the pairs with key > query + causal_offset.
template <class V>
void add_causal(const AttentionParams& p, const Tile& t, int64_t masked_keys, MaskTile<typename V::Scalar>& out) {
  using Scalar = typename V::Scalar;
  for (int64_t k = 0; k < masked_keys; ++k) {
    const int64_t first_visible = min_of(max_of(t.key_begin + k - p.causal_offset - t.queries.begin, 0), t.lanes);
    for (int64_t q = 0; q < first_visible; ++q) out.addend[k * t.lanes + q] = -FloatFormat<Scalar>::kInfinity;
  }
  out.hides_pairs = true;
}

template <class V>
TileKind resolve_mask(const AttentionParams& p, const Tile& t, MaskTile<typename V::Scalar>& out) {
  out.hides_pairs = false;
  const int64_t masked_keys = max_of(0, min_of(t.key_count, p.num_keys - p.appended_keys - t.key_begin));
  if (masked_keys == 0) return TileKind::Plain;
  const int64_t last_query = t.queries.begin + t.queries.count - 1;
  const bool covers_tile = masked_keys == t.key_count;
  if (p.causal && covers_tile && t.key_begin > last_query + p.causal_offset) return TileKind::Skip;
  const bool causal_cuts = p.causal && t.key_begin + masked_keys - 1 > t.queries.begin + p.causal_offset;

  bool first = true;
  for (const MaskView& m : p.masks) {
    if (m.kind == MaskKind::None) continue;
    const MaskRegion region{t.queries.batch * m.stride_b + t.queries.head * m.stride_h + t.queries.begin * m.stride_q +
                                t.key_begin * m.stride_k,
                            m.stride_q == 0 ? 1 : t.queries.count, masked_keys};
    const TileKind kind = scan_mask(m, region);
    if (kind == TileKind::Skip && covers_tile) return TileKind::Skip;
    if (kind == TileKind::Plain) continue;
    add_mask<V>(m, t, region, first, out);
    first = false;
  }
  if (first && !causal_cuts) return TileKind::Plain;
  const int64_t untouched = first ? 0 : masked_keys;  // appended keys, or all before the causal order is written
  __builtin_memset(out.addend + untouched * t.lanes, 0,
                   static_cast<size_t>((t.key_count - untouched) * t.lanes) * sizeof(*out.addend));
  if (causal_cuts) add_causal<V>(p, t, masked_keys, out);
  return TileKind::Masked;
}

// Scores plus addends; a hidden pair becomes minus infinity even where the score is NaN.
template <class V>
void apply_mask(typename V::Scalar* scores, const typename V::Scalar* addend, int64_t count) {
  for (int64_t i = 0; i < count; i += V::kWidth) {
    const typename V::Vec a = V::load(addend + i);
    V::store(scores + i, V::select(a == -V::kInfinity, a, V::load(scores + i) + a));
  }
}

}  // namespace
}  // namespace mha_ext::kernels
