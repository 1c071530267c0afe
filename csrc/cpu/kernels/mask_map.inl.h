// The map of a bool mask that serves several heads: made once a call, so that not each head has to look at every pair.
#pragma once

#include "tile.inl.h"

namespace mha_ext::kernels {
namespace {

enum class Hidden { None, Some, All };

template <class V>
void map_mask_rows(const MaskView& m, int64_t rows, int64_t keys, uint8_t* map) {
  using ByteVec = typename V::ByteVec;
  constexpr int64_t kBytes = sizeof(ByteVec);
  const auto* data = static_cast<const uint8_t*>(m.data);
  const uint8_t when_set = m.true_hides ? kMapHidden : kMapVisible,
                when_clear = m.true_hides ? kMapVisible : kMapHidden;
  alignas(64) uint8_t any[kBlockKeys], all[kBlockKeys];
  for (int64_t begin = 0; begin < keys; begin += kBlockKeys) {
    const int64_t count = min_of(kBlockKeys, keys - begin);
    const uint8_t* first = data + begin * m.stride_k;
    int64_t k = 0;
    for (; m.stride_k == 1 && k + kBytes <= count; k += kBytes) {
      ByteVec some{}, every = ByteVec{} == 0;
      for (int64_t q = 0; q < rows; ++q) {
        const ByteVec set = V::load_bytes(first + q * m.stride_q + k) != 0;
        some |= set;
        every &= set;
      }
      V::store_bytes(any + k, some);
      V::store_bytes(all + k, every);
    }
    for (; k < count; ++k) {
      any[k] = 0, all[k] = 1;
      for (int64_t q = 0; q < rows; ++q) {
        const bool set = first[q * m.stride_q + k * m.stride_k] != 0;
        any[k] |= set;
        all[k] &= set;
      }
    }
    uint8_t entry = 0;
    for (k = 0; k < count; ++k) {
      const int64_t bit = k / kMapKeys;
      if (any[k] != 0) entry |= static_cast<uint8_t>(when_set << bit);
      if (all[k] == 0) entry |= static_cast<uint8_t>(when_clear << bit);
    }
    map[begin / kBlockKeys] = entry;
  }
}

// What a mask's map says of a tile.
MHA_EXT_INLINE Hidden look_up(const MaskView& m, const Tile& t) {
  const QueryBlock& q = t.queries;
  const uint8_t* entry = m.map + q.batch * m.map_stride_b + q.head * m.map_stride_h + t.key_begin / kBlockKeys;
  uint8_t found = 0;
  for (int64_t row = q.begin / kMapQueries; row * kMapQueries < q.begin + q.count; ++row) {
    found |= entry[row * m.map_stride_row];
  }
  return (found & kMapAllVisible) == 0 ? Hidden::All : (found & kMapAllHidden) == 0 ? Hidden::None : Hidden::Some;
}

// Leaves out of the tile what a mask's map shows as seen by no query of a vector.
template <class V>
void cut_by_map(const MaskView& m, const Tile& t, TileEdge& edge) {
  static_assert(kMapQueries % V::kWidth == 0, "rows of a map are whole vectors");
  const QueryBlock& q = t.queries;
  if (m.map == nullptr || q.begin % kMapQueries != 0) return;
  const uint8_t* entry = m.map + q.batch * m.map_stride_b + q.head * m.map_stride_h +
                         q.begin / kMapQueries * m.map_stride_row + t.key_begin / kBlockKeys;
  for (int64_t c = 0; c < t.lanes; c += V::kWidth) {
    const int visible = entry[c / kMapQueries * m.map_stride_row] / kMapVisible;
    const KeySpan span = visible == 0  // which ctz and clz are not defined for
                             ? KeySpan{0, 0}
                             : KeySpan{__builtin_ctz(visible) * kMapKeys, (32 - __builtin_clz(visible)) * kMapKeys};
    if (span.begin > 0 || span.end < t.key_count) edge.limit<V>(t, c, span);
  }
}

}  // namespace
}  // namespace mha_ext::kernels
