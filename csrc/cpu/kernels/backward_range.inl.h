// Backward over a range of keys: query blocks outside, key tiles inside.
#pragma once

#include "backward_by_tiles.inl.h"

namespace mha_ext::kernels {
namespace {

template <class V>
void add_share(int64_t count, bool first, BackwardScratch<V>& s) {
  if (first) {
    typename V::Scalar* share = s.grad_query;
    s.grad_query = s.grad_query_sum;
    s.grad_query_sum = share;
    return;
  }
  for (int64_t i = 0; i < count; i += V::kWidth) {
    V::store(s.grad_query_sum + i, V::load(s.grad_query_sum + i) + V::load(s.grad_query + i));
  }
}

template <class V>
void write_grad_query(const BackwardParams& b, const QueryBlock& block, int64_t lanes, int64_t range,
                      BackwardScratch<V>& s) {
  using Scalar = typename V::Scalar;
  const AttentionParams& p = b.attention;
  const int64_t width = padded_width<V>(p.head_dim);
  const Scalar scale = static_cast<Scalar>(p.scale);
  if (b.grad_query_shares == nullptr) {
    const auto scaled = [=](auto x, int64_t) { return x * scale; };
    write_columns<V>(b.grad_query, block, lanes, p.head_dim, s.grad_query_sum, s.grad_query_rows, width, scaled);
    return;
  }
  MutableTensorView share;
  share.type = kTypeOf<Scalar>;
  share.stride_d = 1;
  share.stride_t = p.head_dim;
  share.stride_h = p.num_queries * share.stride_t;
  share.stride_b = p.heads * share.stride_h;
  share.data = static_cast<Scalar*>(b.grad_query_shares) + range * p.batch * share.stride_b;
  write_columns<V>(share, block, lanes, p.head_dim, s.grad_query_sum, s.grad_query_rows, width, Unchanged());
}

// Gradients of a range of keys: load(block, lanes) for each block of queries that sees any of them, run(tile, its first
// key in the range) for each of its tiles.
template <class V, class Load, class Run>
void gradients_of_range(const BackwardParams& b, const KeyRange& range, BackwardScratch<V>& s, const Load& load,
                        const Run& run) {
  using Scalar = typename V::Scalar;
  const AttentionParams& p = b.attention;
  const int64_t count = range.end - range.begin;
  const int64_t d = padded_width<V>(p.head_dim), dv = padded_width<V>(p.value_dim);
  __builtin_memset(s.grad_key, 0, static_cast<size_t>(count * d) * sizeof(Scalar));
  __builtin_memset(s.grad_value, 0, static_cast<size_t>(count * dv) * sizeof(Scalar));
  const int64_t group = p.heads / p.kv_heads;
  for (int64_t head = range.kv_head * group; head < (range.kv_head + 1) * group; ++head) {
    for (int64_t q = 0; q < p.num_queries; q += p.query_block) {
      const QueryBlock block{range.batch, head, q, min_of(p.query_block, p.num_queries - q)};
      const int64_t lanes = round_up(block.count, V::kWidth);
      const KeySpan seen = keys_to_visit(p, block, kBlockKeys);
      if (seen.begin < range.end && seen.end > range.begin) load(block, lanes);
      for (int64_t begin = range.begin; begin < range.end; begin += b.range_keys) {
        const int64_t end = min_of(begin + b.range_keys, range.end);
        __builtin_memset(s.grad_query, 0, static_cast<size_t>(d * lanes) * sizeof(Scalar));
        for (int64_t k = max_of(begin, seen.begin); k < min_of(end, seen.end); k += kBlockKeys) {
          run({block, lanes, k, min_of(kBlockKeys, end - k)}, k - range.begin);
        }
        add_share<V>(d * lanes, begin == range.begin, s);
      }
      if (b.grad_query.data != nullptr || b.grad_query_shares != nullptr) {
        write_grad_query<V>(b, block, lanes, range.begin / b.range_keys, s);
      }
    }
  }
  const QueryBlock rows{range.batch, range.kv_head, range.begin, count};
  if (b.grad_key.data != nullptr) write_rows(b.grad_key, rows, p.head_dim, s.grad_key, d);
  if (b.grad_value.data != nullptr) write_rows(b.grad_value, rows, p.value_dim, s.grad_value, dv);
}

template <class V>
void backward_range(const BackwardParams& b, const KeyRange& range, void* scratch) {
  BackwardScratch<V> s(Arena(scratch), b.attention, range.end - range.begin);
  s.undoes_softcap = true;
  if constexpr (V::kMultipliesTiles) s.tiles.load_keys(b.attention, range);
  gradients_of_range<V>(
      b, range, s,
      [&](const QueryBlock& block, int64_t lanes) {
        load_query_block<V>(b, block, lanes, s);
        if (b.grad_weights.data != nullptr) find_weights_delta<V>(b, block, lanes, s);
      },
      [&](const Tile& t, int64_t key_in_range) {
        if constexpr (V::kMultipliesTiles) {
          backward_tile_by_tiles<V>(b, t, key_in_range, s);
        } else {
          backward_tile<V>(b, t, key_in_range, s);
        }
      });
}

template <class V>
size_t backward_scratch_bytes(const AttentionParams& p, int64_t range_keys) {
  return BackwardScratch<V>(Arena(nullptr), p, range_keys).bytes;
}

}  // namespace
}  // namespace mha_ext::kernels
