// Which keys a query may see by its place alone: the causal order, a window's left side, a range that was given for it.
// Together they leave one span of keys a query. Appended keys are not part of this: every query sees them.
#pragma once

#include "tile.inl.h"

namespace mha_ext::kernels {
namespace {

// Whether something other than the causal order bounds the keys of a query.
MHA_EXT_INLINE bool is_bounded(const AttentionParams& p) { return p.has_left || p.range_first != nullptr; }

MHA_EXT_INLINE int64_t masked_keys(const AttentionParams& p) { return p.num_keys - p.appended_keys; }

MHA_EXT_INLINE KeySpan span_of(int64_t begin, int64_t end) { return begin < end ? KeySpan{begin, end} : KeySpan{0, 0}; }

// The causal order and the window of queries [query, query + count).
MHA_EXT_INLINE KeySpan window_of(const AttentionParams& p, int64_t query, int64_t count) {
  const int64_t begin = p.has_left ? max_of(0, query + p.left_offset) : 0, keys = masked_keys(p);
  return span_of(begin, p.causal ? min_of(query + count + p.causal_offset, keys) : keys);
}

MHA_EXT_INLINE KeySpan keys_of_query(const AttentionParams& p, int64_t batch, int64_t query) {
  const KeySpan window = window_of(p, query, 1);
  if (p.range_first == nullptr) return window;
  const int64_t at = batch * p.range_stride_b + query;
  return span_of(max_of(window.begin, p.range_first[at]), min_of(window.end, p.range_last[at]));
}

// From the first to the last key that any of the queries sees.
MHA_EXT_INLINE KeySpan keys_of_block(const AttentionParams& p, const QueryBlock& block) {
  if (p.range_first == nullptr) return window_of(p, block.begin, block.count);
  KeySpan all{p.num_keys, 0};
  for (int64_t q = block.begin; q < block.begin + block.count; ++q) {
    const KeySpan one = keys_of_query(p, block.batch, q);
    if (!one.empty()) all = {min_of(all.begin, one.begin), max_of(all.end, one.end)};
  }
  return span_of(all.begin, all.end);
}

// Keys that a block has to be run against, appended ones included; beginning at a whole number of steps.
MHA_EXT_INLINE KeySpan keys_to_visit(const AttentionParams& p, const QueryBlock& block, int64_t step) {
  if (!p.causal && !is_bounded(p)) return {0, p.num_keys};
  const KeySpan seen = keys_of_block(p, block);
  const int64_t begin = seen.empty() ? masked_keys(p) : seen.begin, end = p.appended_keys > 0 ? p.num_keys : seen.end;
  return span_of(begin / step * step, end);
}

// Of each lane of a tile, the span of its keys that the lane's query sees: bytes, so that sixteen compare at once.
struct LaneSpans {
  alignas(64) uint8_t begin[kBlockQueries], end[kBlockQueries];
  bool any = false, all = true;  // whether any lane sees a key, and every lane all of them

  LaneSpans(const AttentionParams& p, const Tile& t, int64_t keys) {
    static_assert(kBlockKeys < 256, "ends fit into bytes");
    __builtin_memset(begin, 0, sizeof(begin));
    __builtin_memset(end, 0, sizeof(end));
    for (int64_t q = 0; q < t.queries.count; ++q) {
      const KeySpan seen = keys_of_query(p, t.queries.batch, t.queries.begin + q);
      const int64_t first = max_of(0, seen.begin - t.key_begin), last = min_of(seen.end - t.key_begin, keys);
      all = all && first == 0 && last == keys;
      if (first >= last) continue;
      any = true;
      begin[q] = static_cast<uint8_t>(first);
      end[q] = static_cast<uint8_t>(last);
    }
  }

  // Of `count` lanes together.
  KeySpan together(int64_t lane, int64_t count) const {
    KeySpan span{kBlockKeys, 0};
    for (int64_t q = lane; q < lane + count; ++q) {
      if (end[q] > 0) span = {min_of(span.begin, begin[q]), max_of(span.end, end[q])};
    }
    return span_of(span.begin, span.end);
  }
};

}  // namespace
}  // namespace mha_ext::kernels
