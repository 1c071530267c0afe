// Which pairs of a tile are hidden, and what is added to the scores of the others. Causal order, a mask and padding
// are resolved together, once a tile: a tile is skipped, or runs as if there were no mask, or carries
//   addends [key][query], from float masks: added to the scores; minus infinity hides the pair;
//   hidden  [key][query], from bool masks: a byte a pair, 255 where it is hidden;
//   an edge, where the causal order or a mask's map shows that queries see none of the first or last keys: products,
//   softmax and gradients leave those out.
#pragma once

#include "bounds.inl.h"
#include "mask_map.inl.h"
#include "rows.inl.h"

namespace mha_ext::kernels {
namespace {

template <typename Scalar>
struct MaskTile {
  Scalar* addend;        // [kBlockKeys][lanes]
  Scalar* rows;          // [kBlockQueries][kBlockKeys], a float mask before it is turned, where it is copied
  uint8_t* hidden;       // [kBlockKeys][kBlockQueries]
  uint8_t* hidden_rows;  // [kBlockQueries][kBlockKeys]
  Scalar* turned;        // a second mask before it joins the first
  TileEdge edge;
  bool has_addends = false, has_hidden = false;
  bool hides_pairs = false;  // of addends known only after apply_mask or the backward's softmax
};

// Bytes as lanes, to turn a bool mask.
struct ByteLanes {
  using Scalar = uint8_t;
  static constexpr int kWidth = 16;
  typedef uint8_t Vec __attribute__((vector_size(16)));
  typedef uint8_t UnalignedVec __attribute__((vector_size(16), aligned(1), may_alias));
  static MHA_EXT_INLINE Vec load(const uint8_t* p) { return *reinterpret_cast<const UnalignedVec*>(p); }
  static MHA_EXT_INLINE void store(uint8_t* p, Vec v) { *reinterpret_cast<UnalignedVec*>(p) = v; }
  static MHA_EXT_INLINE Vec interleave_low(Vec a, Vec b) {
    return __builtin_shufflevector(a, b, 0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23);
  }
  static MHA_EXT_INLINE Vec interleave_high(Vec a, Vec b) {
    return __builtin_shufflevector(a, b, 8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31);
  }
};

// The part of a tile that one mask covers, as it lies: `rows` rows (one, where all queries have the same), from
// `offset`.
struct MaskRegion {
  int64_t offset, rows, keys;
};

// A bool mask's region as hidden bytes [rows][kBlockKeys], zero behind its keys.
template <class V>
Hidden read_hidden_rows(const MaskView& m, const MaskRegion& r, uint8_t* rows) {
  using ByteVec = typename V::ByteVec;
  constexpr int64_t kBytes = sizeof(ByteVec);
  static_assert(kBlockKeys % kBytes == 0, "whole vectors of bytes");
  ByteVec any[kBlockKeys / kBytes] = {}, all[kBlockKeys / kBytes];
  for (ByteVec& vec : all) vec = ByteVec{} == 0;
  const uint8_t flip = m.true_hides ? 0 : 255;
  const bool whole_rows = m.stride_k == 1 && r.keys == kBlockKeys;
  for (int64_t q = 0; q < r.rows; ++q) {
    const uint8_t* src = static_cast<const uint8_t*>(m.data) + r.offset + q * m.stride_q;
    uint8_t* row = rows + q * kBlockKeys;
    if (!whole_rows) {
      __builtin_memset(row, 0, static_cast<size_t>(kBlockKeys));
      for (int64_t k = 0; k < r.keys; ++k) row[k] = static_cast<uint8_t>((src[k * m.stride_k] != 0 ? 255 : 0) ^ flip);
    }
    for (int64_t i = 0; i < kBlockKeys / kBytes; ++i) {
      ByteVec hidden = V::load_bytes(row + i * kBytes);
      if (whole_rows) {
        hidden = (V::load_bytes(src + i * kBytes) != 0) ^ flip;
        V::store_bytes(row + i * kBytes, hidden);
      }
      any[i] |= hidden;
      all[i] &= hidden;
    }
  }
  alignas(64) uint8_t any_hidden[kBlockKeys], all_hidden[kBlockKeys];
  for (int64_t i = 0; i < kBlockKeys / kBytes; ++i) {
    V::store_bytes(any_hidden + i * kBytes, any[i]);
    V::store_bytes(all_hidden + i * kBytes, all[i]);
  }
  uint8_t some = 0, every = 255;
  for (int64_t k = 0; k < r.keys; ++k) some |= any_hidden[k], every &= all_hidden[k];
  return some == 0 ? Hidden::None : every != 0 ? Hidden::All : Hidden::Some;
}

// Adds a bool mask's hidden bytes to those of the tile.
template <class V>
void add_hidden(const MaskView& m, const Tile& t, const MaskRegion& r, MaskTile<typename V::Scalar>& out) {
  const bool first = !out.has_hidden;
  out.has_hidden = out.hides_pairs = true;
  if (m.stride_q == 0) {
    for (int64_t k = 0; k < kBlockKeys; ++k) {
      uint8_t* row = out.hidden + k * kBlockQueries;
      if (out.hidden_rows[k] != 0 || first)
        __builtin_memset(row, out.hidden_rows[k], static_cast<size_t>(kBlockQueries));
    }
    return;
  }
  const int64_t rows = round_up(t.lanes, ByteLanes::kWidth);
  __builtin_memset(out.hidden_rows + r.rows * kBlockKeys, 0, static_cast<size_t>((rows - r.rows) * kBlockKeys));
  uint8_t* turned = reinterpret_cast<uint8_t*>(out.turned);
  uint8_t* dst = first ? out.hidden : turned;
  transpose<ByteLanes>(out.hidden_rows, kBlockKeys, rows, kBlockKeys, dst, kBlockQueries);
  if (first) return;
  for (int64_t i = 0; i < kBlockKeys * kBlockQueries; ++i) out.hidden[i] |= turned[i];
}

// a + b, except that a hidden pair stays hidden whatever the other addend is, and that two finite addends hide nothing.
template <class V>
MHA_EXT_INLINE typename V::Vec combine_addends(typename V::Vec a, typename V::Vec b) {
  const typename V::Vec sum = a + b;
  const typename V::Vec finite = V::select(sum == -V::kInfinity, V::broadcast(V::Format::kLowest), sum);
  return V::select(b == -V::kInfinity, b, V::select(a == -V::kInfinity, a, finite));
}

// The next tile's part of a mask: its rows lie pages apart, where a processor does not look ahead. Forward with a float
// mask takes 2 to 4 % less at T = 2048.
template <typename Scalar>
MHA_EXT_INLINE void prefetch_next_keys(const Scalar* rows, int64_t ld, int64_t count) {
  constexpr int64_t kLine = 64 / static_cast<int64_t>(sizeof(Scalar));
  for (int64_t q = 0; q < count; ++q) {
    for (int64_t k = kBlockKeys; k < 2 * kBlockKeys; k += kLine) __builtin_prefetch(rows + q * ld + k, 0, 2);
  }
}

// Adds a float mask to the tile's addends, or puts it in their place while there are none.
template <class V>
void add_addends(const MaskView& m, const Tile& t, const MaskRegion& r, MaskTile<typename V::Scalar>& out) {
  using Scalar = typename V::Scalar;
  const bool first = !out.has_addends;
  out.has_addends = true;
  const Scalar* src = static_cast<const Scalar*>(m.data) + r.offset;
  int64_t ld = m.stride_q;
  const bool in_place = m.stride_q != 0 && m.stride_k == 1 && r.keys == kBlockKeys && r.rows == t.lanes;
  if (!in_place && !m.lanes_lie) {
    for (int64_t q = 0; q < r.rows; ++q) {
      for (int64_t k = 0; k < r.keys; ++k) out.rows[q * kBlockKeys + k] = src[q * m.stride_q + k * m.stride_k];
    }
    src = out.rows, ld = kBlockKeys;
  }
  Scalar* dst = first ? out.addend : out.turned;
  if (m.lanes_lie) {
    for (int64_t k = 0; k < r.keys; ++k) {
      for (int64_t c = 0; c < t.lanes; c += V::kWidth)
        V::store(dst + k * t.lanes + c, V::load(src + k * m.stride_k + c));
    }
  } else if (m.stride_q != 0) {
    if (in_place) prefetch_next_keys(src, ld, r.rows);
    transpose<V>(src, ld, t.lanes, round_up(r.keys, V::kWidth), dst, t.lanes);
  } else {
    for (int64_t k = 0; k < r.keys; ++k) {
      for (int64_t c = 0; c < t.lanes; c += V::kWidth) V::store(dst + k * t.lanes + c, V::broadcast(src[k]));
    }
  }
  if (!first) {
    for (int64_t i = 0; i < r.keys * t.lanes; i += V::kWidth) {
      V::store(out.addend + i, combine_addends<V>(V::load(out.addend + i), V::load(out.turned + i)));
    }
  } else {  // appended keys have no addend
    __builtin_memset(out.addend + r.keys * t.lanes, 0,
                     static_cast<size_t>((t.key_count - r.keys) * t.lanes) * sizeof(Scalar));
  }
}

// Hides what lies outside the spans of the tile's queries; false when no pair is left that they show.
template <class V>
bool add_bounds(const AttentionParams& p, const Tile& t, int64_t keys, MaskTile<typename V::Scalar>& out) {
  using Bytes = typename ByteLanes::Vec;
  const LaneSpans spans(p, t, keys);
  if (spans.all) return true;
  const bool covers_tile = keys == t.key_count;
  if (!spans.any && covers_tile) return false;
  if (!out.has_hidden) __builtin_memset(out.hidden, 0, static_cast<size_t>(kBlockKeys * kBlockQueries));
  out.has_hidden = out.hides_pairs = true;
  for (int64_t k = 0; k < keys; ++k) {
    const auto key = static_cast<uint8_t>(k);
    uint8_t* row = out.hidden + k * kBlockQueries;
    for (int64_t c = 0; c < t.lanes; c += ByteLanes::kWidth) {
      const Bytes before = ByteLanes::load(spans.begin + c) > key, behind = ByteLanes::load(spans.end + c) <= key;
      ByteLanes::store(row + c, ByteLanes::load(row + c) | before | behind);
    }
  }
  for (int64_t c = 0; covers_tile && c < t.lanes; c += V::kWidth) {
    out.edge.template limit<V>(t, c, spans.together(c, V::kWidth));
  }
  return true;
}

// Finds what hides pairs of the tile; false when no pair is visible.
template <class V>
bool resolve_mask(const AttentionParams& p, const Tile& t, MaskTile<typename V::Scalar>& out) {
  out.has_addends = out.has_hidden = out.hides_pairs = false;
  out.edge.cuts = false;
  out.edge.diagonal = TileEdge::kNotCausal;
  const int64_t keys = max_of(0, min_of(t.key_count, masked_keys(p) - t.key_begin));
  if (keys == 0) return true;
  const int64_t last_query = t.queries.begin + t.queries.count - 1;
  const bool covers_tile = keys == t.key_count;
  if (p.causal && covers_tile && t.key_begin > last_query + p.causal_offset) return false;

  for (const MaskView& m : p.masks) {
    if (m.kind == MaskKind::None) continue;
    const MaskRegion region{t.queries.batch * m.stride_b + t.queries.head * m.stride_h + t.queries.begin * m.stride_q +
                                t.key_begin * m.stride_k,
                            m.stride_q == 0 ? 1 : t.queries.count, keys};
    if (m.kind == MaskKind::Float) {
      add_addends<V>(m, t, region, out);
      continue;
    }
    if (m.map != nullptr) {
      const Hidden known = look_up(m, t);
      if (known == Hidden::All && covers_tile) return false;
      if (known == Hidden::None) continue;
    }
    const Hidden hidden = read_hidden_rows<V>(m, region, out.hidden_rows);
    if (hidden == Hidden::All && covers_tile) return false;
    if (hidden == Hidden::None) continue;
    add_hidden<V>(m, t, region, out);
    if (covers_tile) cut_by_map<V>(m, t, out.edge);
  }
  if (is_bounded(p) || (p.causal && !covers_tile)) return add_bounds<V>(p, t, keys, out);
  if (!p.causal || t.key_begin + keys - 1 <= t.queries.begin + p.causal_offset) return true;
  out.edge.template cut_causally<V>(t, t.queries.begin + p.causal_offset - t.key_begin);
  out.hides_pairs = true;
  return true;
}

// Whether a pair of the tile is hidden.
template <typename Scalar>
MHA_EXT_INLINE bool hides(const MaskTile<Scalar>& mask, int64_t lanes, int64_t key, int64_t lane) {
  if (lane < mask.edge.first_lane(key)) return true;
  if (mask.has_hidden && mask.hidden[key * kBlockQueries + lane] != 0) return true;
  return mask.has_addends && mask.addend[key * lanes + lane] == -FloatFormat<Scalar>::kInfinity;
}

// What a tile carries, known to the compiler: kHidden and kAddends say what there is, kEdge whether there may be an
// edge.
template <bool kHiddenBytes, bool kFloatAddends, bool kCausalEdge>
struct MaskParts {
  static constexpr bool kHidden = kHiddenBytes, kAddends = kFloatAddends, kEdge = kCausalEdge;
  static constexpr bool kAny = kHidden || kAddends || kEdge;
};

template <typename Scalar, class Run>
MHA_EXT_INLINE void with_parts(const MaskTile<Scalar>& mask, const Run& run) {
  if (mask.has_hidden) {
    mask.has_addends ? run(MaskParts<true, true, true>()) : run(MaskParts<true, false, true>());
  } else if (mask.has_addends) {
    run(MaskParts<false, true, true>());
  } else {
    mask.edge.cuts ? run(MaskParts<false, false, true>()) : run(MaskParts<false, false, false>());
  }
}

// What a tile carries for one of its keys.
template <typename Scalar>
struct MaskRow {
  const Scalar* addend;
  const uint8_t* hidden;
  int64_t first_lane;

  MHA_EXT_INLINE MaskRow(const MaskTile<Scalar>& mask, int64_t lanes, int64_t key)
      : addend(mask.addend + key * lanes),
        hidden(mask.hidden + key * kBlockQueries),
        first_lane(mask.edge.first_lane(key)) {}
};

// Of the vector that begins at lane c: the masked scores, plus the addend, or minus infinity even where the score is
// NaN; and which lanes are hidden.
template <class V, class Parts>
MHA_EXT_INLINE typename V::Vec mask_vector(const MaskRow<typename V::Scalar>& row, int64_t c, typename V::Vec score,
                                           typename V::IntVec& hidden) {
  hidden = typename V::IntVec{};
  if constexpr (Parts::kHidden) hidden = V::widen_bytes(row.hidden + c);
  if constexpr (Parts::kAddends) {
    const typename V::Vec addend = V::load(row.addend + c);
    hidden |= addend == -V::kInfinity;
    score += addend;
  }
  if constexpr (Parts::kEdge) {
    if (row.first_lane > c) hidden |= V::first_lanes(row.first_lane - c);
  }
  return V::select(hidden, V::broadcast(-V::kInfinity), score);
}

template <class V>
void apply_mask(const Tile& t, MaskTile<typename V::Scalar>& mask, typename V::Scalar* scores) {
  with_parts(mask, [&](auto parts) {
    using Parts = decltype(parts);
    if constexpr (!Parts::kAny) return;
    const MaskTile<typename V::Scalar> local = mask;  // a copy: the compiler must not expect the stores to change it
    const Tile tile = t;
    const int64_t lanes = tile.lanes;
    typename V::IntVec any_hidden{};
    for (int64_t k = 0; k < tile.key_count; ++k) {
      const MaskRow<typename V::Scalar> row(local, lanes, k);
      const bool only_causal = !Parts::kHidden && !Parts::kAddends;
      const int64_t end = only_causal ? min_of(round_up(row.first_lane, V::kWidth), lanes) : lanes;
      for (int64_t c = 0; c < end; c += V::kWidth) {
        if (Parts::kEdge && !local.edge.template keys_seen<V>(tile, c).holds(k)) continue;
        typename V::Scalar* score = scores + k * lanes + c;
        typename V::IntVec hidden;
        V::store(score, mask_vector<V, Parts>(row, c, V::load(score), hidden));
        if constexpr (Parts::kAddends) any_hidden |= hidden;
      }
    }
    if constexpr (Parts::kAddends) mask.hides_pairs = mask.hides_pairs || V::any(any_hidden);
  });
}

}  // namespace
}  // namespace mha_ext::kernels
