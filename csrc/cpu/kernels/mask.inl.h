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

// Copies n entries of a mask as addends; returns how many of them hide their pair.
template <typename Scalar>
int64_t mask_addends(const MaskView& m, int64_t offset, int64_t n, Scalar* dst) {
  constexpr Scalar kHidden = -FloatFormat<Scalar>::kInfinity;
  int64_t hidden = 0;
  if (m.kind == MaskKind::Float) {
    const Scalar* src = static_cast<const Scalar*>(m.data) + offset;
    for (int64_t k = 0; k < n; ++k) {
      dst[k] = src[k * m.stride_k];
      hidden += dst[k] == kHidden;
    }
  } else {
    const uint8_t* src = static_cast<const uint8_t*>(m.data) + offset;
    for (int64_t k = 0; k < n; ++k) {
      const bool hide = (src[k * m.stride_k] != 0) == m.true_hides;
      dst[k] = hide ? kHidden : Scalar(0);
      hidden += hide;
    }
  }
  return hidden;
}

// a + b, except that a hidden pair stays hidden whatever the other addend is.
template <class V>
MHA_EXT_INLINE typename V::Vec combine_addends(typename V::Vec a, typename V::Vec b) {
  return V::select(b == -V::kInfinity, b, V::select(a == -V::kInfinity, a, a + b));
}

// Adds one mask to the tile's addends. Returns whether every pair it covers is hidden, when it covers the whole tile.
template <class V>
bool add_mask(const MaskView& m, const Tile& t, int64_t masked_keys, MaskTile<typename V::Scalar>& out) {
  using Scalar = typename V::Scalar;
  const int64_t base = t.queries.batch * m.stride_b + t.queries.head * m.stride_h + t.queries.begin * m.stride_q +
                       t.key_begin * m.stride_k;
  const bool same_for_queries = m.stride_q == 0;
  const int64_t rows = same_for_queries ? 1 : t.queries.count;
  int64_t hidden = 0;
  for (int64_t q = 0; q < rows; ++q) {
    hidden += mask_addends(m, base + q * m.stride_q, masked_keys, out.rows + q * kBlockKeys);
  }
  out.hides_pairs |= hidden > 0;
  if (m.kind == MaskKind::Bool && hidden == 0) return false;
  if (same_for_queries) {
    for (int64_t k = 0; k < masked_keys; ++k) {
      for (int64_t c = 0; c < t.lanes; c += V::kWidth) {
        Scalar* addend = out.addend + k * t.lanes + c;
        V::store(addend, combine_addends<V>(V::load(addend), V::broadcast(out.rows[k])));
      }
    }
  } else {
    alignas(64) Scalar turned[kBlockKeys * V::kWidth];
    const int64_t padded_keys = round_up(masked_keys, V::kWidth);
    for (int64_t c = 0; c < t.lanes; c += V::kWidth) {
      transpose<V>(out.rows + c * kBlockKeys, kBlockKeys, V::kWidth, padded_keys, turned, V::kWidth);
      for (int64_t k = 0; k < masked_keys; ++k) {
        Scalar* addend = out.addend + k * t.lanes + c;
        V::store(addend, combine_addends<V>(V::load(addend), V::load(turned + k * V::kWidth)));
      }
    }
  }
  return hidden == rows * masked_keys && masked_keys == t.key_count;
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

  bool any_mask = causal_cuts;
  for (const MaskView& m : p.masks) any_mask |= m.kind != MaskKind::None;
  if (!any_mask) return TileKind::Plain;

  __builtin_memset(out.addend, 0, static_cast<size_t>(t.key_count * t.lanes) * sizeof(*out.addend));
  bool has_addends = causal_cuts;
  for (const MaskView& m : p.masks) {
    if (m.kind == MaskKind::None) continue;
    if (add_mask<V>(m, t, masked_keys, out)) return TileKind::Skip;
    has_addends |= m.kind == MaskKind::Float || out.hides_pairs;
  }
  if (causal_cuts) add_causal<V>(p, t, masked_keys, out);
  return has_addends ? TileKind::Masked : TileKind::Plain;
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
