// A block of queries against a few keys, and the edge of what they see.
#pragma once

#include "params.h"
#include "simd.inl.h"

namespace mha_ext::kernels {
namespace {

struct Tile {
  QueryBlock queries;
  int64_t lanes;  // queries.count padded to whole vectors
  int64_t key_begin, key_count;
};

// The tile's rows of K and V.
MHA_EXT_INLINE QueryBlock keys_of(const AttentionParams& p, const Tile& t) {
  return {t.queries.batch, t.queries.head / (p.heads / p.kv_heads), t.key_begin, t.key_count};
}

struct KeySpan {
  int64_t begin, end;  // {0, 0} when there are none

  MHA_EXT_INLINE bool empty() const { return end == 0; }
  MHA_EXT_INLINE bool holds(int64_t key) const { return key >= begin && key < end; }
  MHA_EXT_INLINE bool operator==(const KeySpan& other) const { return begin == other.begin && end == other.end; }
};

// What may be left out of a tile: for each vector of lanes, the keys before and behind those that any of its queries
// sees. There scratch [key][lane] is undefined. Also the causal order inside a tile that it cuts.
struct TileEdge {
  static constexpr int64_t kMaxVectors = kBlockQueries / 2;
  static constexpr int64_t kNotCausal = kBlockKeys;

  bool cuts = false;
  int64_t diagonal = kNotCausal;                 // lane q sees the tile's key k when k <= q + diagonal
  uint8_t begin[kMaxVectors], end[kMaxVectors];  // defined when it cuts

  // Of the vector that begins at a lane.
  template <class V>
  MHA_EXT_INLINE KeySpan keys_seen(const Tile& t, int64_t lane) const {
    static_assert(kBlockQueries / V::kWidth <= kMaxVectors && kBlockKeys < 256, "room for every vector");
    if (!cuts) return {0, t.key_count};
    return {begin[lane / V::kWidth], end[lane / V::kWidth]};
  }

  // The first lane that the causal order lets see a key.
  MHA_EXT_INLINE int64_t first_lane(int64_t key) const { return max_of(0, key - diagonal); }

  // Leaves out what the causal order hides from all queries of a vector.
  template <class V>
  void cut_causally(const Tile& t, int64_t key_diagonal) {
    diagonal = key_diagonal;
    for (int64_t c = 0; c < t.lanes; c += V::kWidth) {
      limit<V>(t, c, {0, max_of(0, min_of(c + V::kWidth + diagonal, t.key_count))});
    }
  }

  // Leaves out what lies outside of a span for the vector that begins at a lane; lanes come in order.
  template <class V>
  void limit(const Tile& t, int64_t lane, const KeySpan& span) {
    if (!cuts) {
      for (int64_t c = 0; c < t.lanes; c += V::kWidth) set<V>(c, {0, t.key_count});
      cuts = true;
    }
    const KeySpan before = keys_seen<V>(t, lane);
    const KeySpan both{max_of(before.begin, span.begin), min_of(before.end, span.end)};
    set<V>(lane, both.begin < both.end ? both : KeySpan{0, 0});
  }

 private:
  template <class V>
  MHA_EXT_INLINE void set(int64_t lane, const KeySpan& span) {
    begin[lane / V::kWidth] = static_cast<uint8_t>(span.begin);
    end[lane / V::kWidth] = static_cast<uint8_t>(span.end);
  }
};

// Calls run(lane, lanes, span) for neighbouring vectors that see the same keys, as many as there are.
template <class V, class Run>
MHA_EXT_INLINE void for_each_span(const Tile& t, const TileEdge& edge, const Run& run) {
  for (int64_t begin = 0, end = 0; begin < t.lanes; begin = end) {
    const KeySpan span = edge.keys_seen<V>(t, begin);
    for (end = begin + V::kWidth; end < t.lanes && edge.keys_seen<V>(t, end) == span;) end += V::kWidth;
    if (!span.empty()) run(begin, end - begin, span);
  }
}

}  // namespace
}  // namespace mha_ext::kernels
