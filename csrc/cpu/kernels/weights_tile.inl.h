// The attention weights themselves, for callers that ask to see them:
//   W^T = factor * sum over heads of exp(S^T - lse), dropped pairs 0, kept ones times 1 / (1 - p)
// One block of queries at a time, all its keys in scratch [T_kv][lanes]; so the mean over heads needs no matrix a head.
#pragma once

#include "dropout.inl.h"
#include "scores.inl.h"

namespace mha_ext::kernels {
namespace {

template <class V>
struct WeightsScratch : ScoreScratch<V> {
  using Scalar = typename V::Scalar;
  Scalar *weights, *turned;

  WeightsScratch(Arena&& arena, const AttentionParams& p) : ScoreScratch<V>(arena, p) {
    weights = arena.take<Scalar>(round_up(p.num_keys, kBlockKeys) * kBlockQueries);
    turned = arena.take<Scalar>(kBlockKeys * kBlockQueries);
    bytes = arena.used();
  }
  size_t bytes;
};

// Adds one head's weights of a tile to s.weights.
template <class V>
void add_weights_tile(const AttentionParams& p, const Tile& t, typename V::Scalar factor, WeightsScratch<V>& s) {
  if (!score_tile<V>(p, t, s).visible) return;
  apply_mask<V>(t, s.mask, s.scores);
  const uint64_t key = p.dropout ? dropout_key(p, t.queries.batch, t.queries.head) : 0;
  for (int64_t k = 0; k < t.key_count; ++k) {
    const DropoutRow<V> row(key, t.key_begin + k);
    for (int64_t c = first_vector<V>(s.mask.edge, k, t.lanes); c < t.lanes; c += V::kWidth) {
      typename V::Vec weight =
          factor * probability_of<V, true>(V::load(s.scores + k * t.lanes + c), V::load(s.softmax.maximum + c),
                                           V::load(s.softmax.sum + c));
      if (p.dropout) weight = V::select(row.keep(t.queries.begin + c, p.drop_below), weight, V::zero());
      typename V::Scalar* sum = s.weights + (t.key_begin + k) * t.lanes + c;
      V::store(sum, V::load(sum) + weight);
    }
  }
}

template <class V>
void write_weights(const WeightsParams& w, const QueryBlock& block, int64_t lanes, WeightsScratch<V>& s) {
  for (int64_t begin = 0; begin < w.attention.num_keys; begin += kBlockKeys) {
    transpose<V>(s.weights + begin * lanes, lanes, kBlockKeys, lanes, s.turned, kBlockKeys);
    write_rows(skip_columns(w.out, begin), block, min_of(kBlockKeys, w.attention.num_keys - begin), s.turned,
               kBlockKeys);
  }
}

template <class V>
void weights_block(const WeightsParams& w, const QueryBlock& block, void* scratch) {
  using Scalar = typename V::Scalar;
  const AttentionParams& p = w.attention;
  WeightsScratch<V> s(Arena(scratch), p);
  const int64_t lanes = round_up(block.count, V::kWidth);
  const Scalar factor = static_cast<Scalar>(p.dropout ? w.factor * p.keep_scale : w.factor);
  __builtin_memset(s.weights, 0, static_cast<size_t>(round_up(p.num_keys, kBlockKeys) * lanes) * sizeof(Scalar));
  for (int64_t head = block.head; head < block.head + w.head_count; ++head) {
    const QueryBlock queries{block.batch, head, block.begin, block.count};
    load_query_columns<V>(p, queries, lanes, s);
    load_lse<V>(w.lse, p, queries, lanes, s);
    for (int64_t k = 0; k < p.num_keys; k += kBlockKeys) {
      add_weights_tile<V>(p, {queries, lanes, k, min_of(kBlockKeys, p.num_keys - k)}, factor, s);
    }
  }
  write_weights<V>(w, block, lanes, s);
}

template <class V>
size_t weights_scratch_bytes(const AttentionParams& p) {
  return WeightsScratch<V>(Arena(nullptr), p).bytes;
}

}  // namespace
}  // namespace mha_ext::kernels
