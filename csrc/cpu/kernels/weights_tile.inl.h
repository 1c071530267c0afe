// Attention that also gives its weights, from the one set of scores that the forward pass computes:
//   W^T = factor * sum over heads of exp(S^T - m) / l, dropped pairs 0, kept ones times 1 / (1 - p)
// One block of queries at a time. P^T of all its keys stays in scratch, [T_kv][lanes], until the row's maximum and sum
// are known: a tile's P^T is measured against the maximum m_i that was known then, so exp(m_i - m) / l is what it still
// lacks. For the mean over heads, a tile is added to the sum just before the next head's scores take its place.
#pragma once

#include "forward_tile.inl.h"

namespace mha_ext::kernels {
namespace {

// What is kept of a tile: the maximum it was measured against, and what its mask did.
template <typename Scalar>
struct KeptTile {
  Scalar maximum[kBlockQueries];
  TileEdge edge;
  bool visible, hides_pairs, in_sum;
};

template <class V>
struct WeightsScratch : ForwardScratch<V> {
  using Scalar = typename V::Scalar;
  Scalar *probabilities, *sum;  // P^T of one head and W^T so far, [T_kv][lanes]; one and the same for a single head
  Scalar *maximum, *factor;     // of the head whose P^T is there
  Scalar* tile_factor;
  KeptTile<Scalar>* tiles;
  bool sees_nan = false;  // that head has a row that is NaN

  WeightsScratch(Arena&& arena, const WeightsParams& w)
      : ForwardScratch<V>(static_cast<Arena&&>(arena), w.forward.attention) {
    const int64_t keys = round_up(w.forward.attention.num_keys, kBlockKeys);
    probabilities = arena.take<Scalar>(keys * w.forward.attention.query_block);
    sum = w.head_count == 1 ? probabilities : arena.take<Scalar>(keys * w.forward.attention.query_block);
    maximum = arena.take<Scalar>(kBlockQueries);
    factor = arena.take<Scalar>(kBlockQueries);
    tile_factor = arena.take<Scalar>(kBlockQueries);
    tiles = arena.take<KeptTile<Scalar>>(keys / kBlockKeys);
    this->bytes = arena.used();
  }
};

// What a tile's P^T lacks, one factor a lane.
template <class V>
void find_tile_factor(const KeptTile<typename V::Scalar>& tile, int64_t lanes, WeightsScratch<V>& s) {
  for (int64_t c = 0; c < lanes; c += V::kWidth) {
    const auto reference = finite_reference<V>(V::load(s.maximum + c));
    V::store(s.tile_factor + c, exp_of<V>(V::load(tile.maximum + c) - reference) * V::load(s.factor + c));
  }
}

template <class V, bool kFirst>
void add_weights(const Tile& t, const TileEdge& edge, const WeightsScratch<V>& s) {
  const auto *probabilities = s.probabilities + t.key_begin * t.lanes, *factor = s.tile_factor;
  auto* sum = s.sum + t.key_begin * t.lanes;
  const int64_t lanes = t.lanes, key_count = t.key_count;
  for (int64_t k = 0; k < key_count; ++k, probabilities += lanes, sum += lanes) {
    for (int64_t c = 0; c < lanes; c += V::kWidth) {
      if (!edge.keys_seen<V>(t, c).holds(k)) {
        if (kFirst) V::store(sum + c, V::zero());
        continue;
      }
      const auto weight = V::load(probabilities + c) * V::load(factor + c);
      V::store(sum + c, kFirst ? weight : V::load(sum + c) + weight);
    }
  }
}

// The same where a row has met a NaN: it is NaN at every pair that it sees, and 0 at the others.
template <class V>
void add_visible_weights(const Tile& t, bool first, WeightsScratch<V>& s) {
  using Scalar = typename V::Scalar;
  for (int64_t k = 0; k < t.key_count; ++k) {
    for (int64_t q = 0; q < t.lanes; ++q) {
      const int64_t at = (t.key_begin + k) * t.lanes + q;
      const Scalar before = first ? Scalar(0) : s.sum[at];
      s.sum[at] = hides(s.mask, t.lanes, k, q) ? before : before + s.probabilities[at] * s.tile_factor[q];
    }
  }
}

// The tile of a head that is done, into the sum.
template <class V>
void collect_tile(const AttentionParams& p, const Tile& t, WeightsScratch<V>& s) {
  KeptTile<typename V::Scalar>& tile = s.tiles[t.key_begin / kBlockKeys];
  if (!tile.visible) return;
  find_tile_factor<V>(tile, t.lanes, s);
  if (s.sees_nan && tile.hides_pairs) {
    resolve_mask<V>(p, t, s.mask);
    add_visible_weights<V>(t, !tile.in_sum, s);
  } else {
    tile.in_sum ? add_weights<V, false>(t, tile.edge, s) : add_weights<V, true>(t, tile.edge, s);
  }
  tile.in_sum = true;
}

template <class V>
Tile tile_at(const AttentionParams& p, const QueryBlock& block, int64_t key_begin) {
  return {block, round_up(block.count, V::kWidth), key_begin, min_of(kBlockKeys, p.num_keys - key_begin)};
}

// One head's out and lse; P^T of its tiles takes the place of that of the head before, which goes to the sum.
template <class V>
void attend_head(const WeightsParams& w, const QueryBlock& block, bool first_head, WeightsScratch<V>& s) {
  const AttentionParams& p = w.forward.attention;
  const int64_t lanes = round_up(block.count, V::kWidth);
  const QueryBlock before{block.batch, block.head - 1, block.begin, block.count};
  load_query_columns<V>(p, block, lanes, s);
  clear<V>(p, block, s.softmax, lanes);
  __builtin_memset(s.accumulator, 0,
                   static_cast<size_t>(padded_width<V>(p.value_dim) * lanes) * sizeof(*s.accumulator));
  for (int64_t begin = 0; begin < p.num_keys; begin += kBlockKeys) {
    if (!first_head) collect_tile<V>(p, tile_at<V>(p, before, begin), s);
    KeptTile<typename V::Scalar>& kept = s.tiles[begin / kBlockKeys];
    s.scores = s.probabilities + begin * lanes;
    kept.visible = forward_tile<V>(p, tile_at<V>(p, block, begin), s);
    kept.edge = s.mask.edge;
    kept.hides_pairs = s.mask.hides_pairs;
    __builtin_memcpy(kept.maximum, s.softmax.maximum, static_cast<size_t>(lanes) * sizeof(*kept.maximum));
  }
  finish_forward<V>(w.forward, block, lanes, s);

  const auto share = static_cast<typename V::Scalar>(w.factor);
  s.sees_nan = false;
  for (int64_t q = 0; q < lanes; ++q) {
    s.maximum[q] = s.softmax.maximum[q];
    s.factor[q] = q < block.count ? s.softmax.rescale[q] * share : 0;  // rescale: 1 / l, and dropout's 1 / (1 - p)
    s.sees_nan |= s.factor[q] != s.factor[q];
  }
}

// The last head's tiles go to the sum on their way out.
template <class V>
void write_weights(const WeightsParams& w, const QueryBlock& block, WeightsScratch<V>& s) {
  const AttentionParams& p = w.forward.attention;
  const QueryBlock last{block.batch, block.head + w.head_count - 1, block.begin, block.count};
  for (int64_t begin = 0; begin < p.num_keys; begin += kBlockKeys) {
    const Tile t = tile_at<V>(p, last, begin);
    collect_tile<V>(p, t, s);
    auto* sum = s.sum + begin * t.lanes;
    if (!s.tiles[begin / kBlockKeys].in_sum) {
      __builtin_memset(sum, 0, static_cast<size_t>(kBlockKeys * t.lanes) * sizeof(*sum));
    }
    write_columns<V>(skip_columns(w.weights, begin), block, t.lanes, t.key_count, sum, s.mask.rows, kBlockKeys,
                     [](auto x, int64_t) { return x; });
  }
}

template <class V>
void weights_block(const WeightsParams& w, const QueryBlock& block, void* scratch) {
  WeightsScratch<V> s(Arena(scratch), w);
  for (int64_t begin = 0; begin < w.forward.attention.num_keys; begin += kBlockKeys) {
    s.tiles[begin / kBlockKeys].in_sum = false;
  }
  for (int64_t i = 0; i < w.head_count; ++i) {
    attend_head<V>(w, {block.batch, block.head + i, block.begin, block.count}, i == 0, s);
  }
  write_weights<V>(w, block, s);
}

template <class V>
size_t weights_scratch_bytes(const WeightsParams& w) {
  return WeightsScratch<V>(Arena(nullptr), w).bytes;
}

}  // namespace
}  // namespace mha_ext::kernels
