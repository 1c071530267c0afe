// Backward, recomputing the probabilities from the saved log-sum-exp (Dao et al. 2022):
//   P^T  = exp(S^T - lse)                       S^T = K (scale Q)^T, masked as in the forward
//   dP^T = V dO^T                               times the keep mask / (1 - p) under dropout
//   dS^T = P^T (dP^T - delta)                   delta[q] = rowsum(dO O) - dlse
//   dV  += P^T dO    dK += dS^T (scale Q)       rows are keys, lanes run along D
//   dQ^T += K^T dS^T                            lanes are queries; times scale when it is written
// For a gradient of the returned weights W, dP^T = dW^T and delta = rowsum(P dP): a first round over the keys finds it.
// Query blocks outside, key tiles inside; dK and dV of the range of keys live in scratch of the compute type.
#pragma once

#include "dropout.inl.h"
#include "gradient_tiles.inl.h"
#include "scores.inl.h"

namespace mha_ext::kernels {
namespace {

enum class Finiteness { Unknown, Finite, NotFinite };

// `scores` becomes P^T; softmax.maximum and .sum hold the two parts of the log-sum-exp.
template <class V>
struct BackwardScratch : ScoreScratch<V> {
  using Scalar = typename V::Scalar;
  using Term = typename V::Term;
  Scalar *grad_rows, *out_rows, *delta;  // of the block of queries
  Term* grad_columns;
  Term* values;  // of the tile
  Scalar* grad_scores;
  Scalar* key_numbers;                          // K where the tile has it in pairs
  Scalar *grad_query, *grad_query_sum;          // of one range of keys, and of those before: [D][lanes]
  Scalar* grad_query_rows;                      // [lanes][D]
  Scalar *grad_key, *grad_value;                // of the range of keys
  Finiteness finiteness = Finiteness::Unknown;  // of Q and dO of the block
  bool undoes_softcap = false;                  // dS is that of the scores before they were capped
  GradientTiles<V> tiles;

  BackwardScratch(Arena&& arena, const AttentionParams& p, int64_t range_keys)
      : ScoreScratch<V>(arena, p), tiles(arena, p, range_keys) {
    const int64_t d = padded_width<V>(p.head_dim), dv = padded_width<V>(p.value_dim);
    const int64_t rows = round_up(range_keys, kBlockKeys);
    const int64_t value_terms = padded_width<V>(terms_in<Term>(p.value_dim));
    grad_rows = arena.take<Scalar>(kBlockQueries * dv);
    grad_columns = arena.take<Term>(kBlockQueries * value_terms);
    out_rows = arena.take<Scalar>(kBlockQueries * dv);
    delta = arena.take<Scalar>(kBlockQueries);
    values = arena.take<Term>(kBlockKeys * value_terms);
    key_numbers = V::kMultipliesPairs && !V::kMultipliesTiles ? arena.take<Scalar>(kBlockKeys * d) : nullptr;
    grad_scores = arena.take<Scalar>(kBlockKeys * kBlockQueries);
    grad_query = arena.take<Scalar>(kBlockQueries * d);
    grad_query_sum = arena.take<Scalar>(kBlockQueries * d);
    grad_query_rows = arena.take<Scalar>(kBlockQueries * d);
    grad_key = arena.take<Scalar>(rows * d);
    grad_value = arena.take<Scalar>(rows * dv);
    bytes = arena.used();
  }
  size_t bytes;
};

// What Q is kept times: scale, but for products by tiles, which take Q as it is and scale dS for dK.
template <class V>
MHA_EXT_INLINE typename V::Scalar query_factor(const AttentionParams& p) {
  return V::kMultipliesTiles ? 1 : static_cast<typename V::Scalar>(p.scale);
}

// Q of a block of queries times query_factor, and what S^T is made from.
template <class V>
void load_query_rows(const AttentionParams& p, const QueryBlock& block, int64_t lanes, BackwardScratch<V>& s) {
  const int64_t d = padded_width<V>(p.head_dim);
  if constexpr (V::kMultipliesPairs) load_query_columns<V>(p, block, lanes, s);
  read_rows<V>(p.query, block, lanes, p.head_dim, query_factor<V>(p), s.query_rows, d);
  if constexpr (!V::kMultipliesPairs) transpose<V>(s.query_rows, d, lanes, d, s.query_columns, lanes);
}

// dO and O of a block, and what dP^T is made from.
template <class V>
void load_grad_rows(const BackwardParams& b, const QueryBlock& block, int64_t lanes, BackwardScratch<V>& s) {
  using Scalar = typename V::Scalar;
  const int64_t cols = b.attention.value_dim, dv = padded_width<V>(cols);
  if (b.grad_out.data == nullptr) {
    const auto clear = [&](auto* scratch, int64_t width) {
      __builtin_memset(scratch, 0, static_cast<size_t>(lanes * width) * sizeof(*scratch));
    };
    clear(s.grad_rows, dv);
    clear(s.out_rows, dv);
    clear(s.grad_columns, padded_width<V>(terms_in<typename V::Term>(cols)));
    return;
  }
  if constexpr (V::kMultipliesPairs) {
    read_pair_columns<V>(b.grad_out, block, lanes, cols, s.grad_rows, s.grad_columns);
  }
  read_rows<V>(b.grad_out, block, lanes, cols, Scalar(1), s.grad_rows, dv);
  read_output<V>(b, block, lanes, s.out_rows, dv);
  if constexpr (!V::kMultipliesPairs) transpose<V>(s.grad_rows, dv, lanes, dv, s.grad_columns, lanes);
}

// Q, dO, lse and delta of a block of queries.
template <class V>
void load_query_block(const BackwardParams& b, const QueryBlock& block, int64_t lanes, BackwardScratch<V>& s) {
  using Scalar = typename V::Scalar;
  const AttentionParams& p = b.attention;
  const int64_t dv = padded_width<V>(p.value_dim);
  load_query_rows<V>(p, block, lanes, s);
  load_grad_rows<V>(b, block, lanes, s);
  const int64_t row = (block.batch * p.heads + block.head) * p.num_queries + block.begin;
  const Scalar* grad_lse = b.grad_lse == nullptr ? nullptr : static_cast<const Scalar*>(b.grad_lse) + row;
  for (int64_t q = 0; q < lanes; ++q) {
    const bool real = q < block.count;
    typename V::Vec sum = V::zero();
    for (int64_t c = 0; c < dv; c += V::kWidth) {
      sum += V::load(s.grad_rows + q * dv + c) * V::load(s.out_rows + q * dv + c);
    }
    Scalar delta = 0;
    for (int i = 0; i < V::kWidth; ++i) delta += sum[i];
    s.delta[q] = real && grad_lse != nullptr ? delta - grad_lse[q] : delta;
  }
  load_lse<V>(b.lse, p, block, lanes, s);
  s.finiteness = Finiteness::Unknown;
  if constexpr (V::kMultipliesTiles) s.tiles.load_queries(p, block.count, lanes, s.query_rows, s.grad_rows);
}

// P^T and dS^T from S^T (in s.scores) and dP^T (in s.grad_scores).
template <class V, class Parts, bool kDropout>
void softmax_backward_tile(const AttentionParams& p, const Tile& t, BackwardScratch<V>& s) {
  using Vec = typename V::Vec;
  using Scalar = typename V::Scalar;
  const Tile tile = t;  // copies: the compiler must not expect the stores below to change them
  const MaskTile<Scalar> mask = s.mask;
  const Scalar *high = s.softmax.maximum, *low = s.softmax.sum, *delta = s.delta;
  Scalar *scores = s.scores, *grad_scores = s.grad_scores;
  typename V::IntVec any_hidden{};
  const uint64_t key = kDropout ? dropout_key(p, tile.queries.batch, tile.queries.head) : 0;
  const Scalar keep_scale = static_cast<Scalar>(p.keep_scale);
  const uint32_t drop_below = p.drop_below;
  const bool capped = p.softcap > 0 && s.undoes_softcap;
  const Softcap<V> cap(p);
  const Scalar factor = s.factor;
  for (int64_t k = 0; k < tile.key_count; ++k) {
    const DropoutRow<V> dropout_row(key, tile.key_begin + k);
    const MaskRow<Scalar> mask_row(mask, tile.lanes, k);
    for (int64_t c = 0; c < tile.lanes; c += V::kWidth) {
      const int64_t at = k * tile.lanes + c;
      if (Parts::kEdge && !mask.edge.template keys_seen<V>(tile, c).holds(k)) {
        V::store(scores + at, V::zero());
        V::store(grad_scores + at, V::zero());
        continue;
      }
      Vec score = with_factor<V>(V::load(scores + at), factor);
      Vec grad = V::load(grad_scores + at);
      typename V::IntVec hidden{};
      if (Parts::kAny) score = mask_vector<V, Parts>(mask_row, c, score, hidden);
      if (Parts::kAddends) any_hidden |= hidden;
      const Vec probability = probability_of<V, Parts::kAny>(score, V::load(high + c), V::load(low + c));
      Vec kept = probability;
      if (kDropout) {
        const auto keep = dropout_row.keep(tile.queries.begin + c, drop_below);
        kept = V::select(keep, probability * keep_scale, V::zero());
        grad = V::select(keep, grad * keep_scale, V::zero());
      }
      grad = probability * (grad - V::load(delta + c));
      if (capped) grad *= cap.slope(V::load(scores + at));
      if (Parts::kAny) grad = V::select(hidden, V::zero(), grad);
      V::store(scores + at, kept);
      V::store(grad_scores + at, grad);
    }
  }
  if (Parts::kAddends) s.mask.hides_pairs = s.mask.hides_pairs || V::any(any_hidden);
}

// dP^T of a tile from the gradient of the weights.
template <class V>
void load_weights_gradient(const BackwardParams& b, const Tile& t, BackwardScratch<V>& s) {
  read_rows<V>(skip_columns(b.grad_weights, t.key_begin), t.queries, t.lanes, t.key_count,
               static_cast<typename V::Scalar>(b.weights_factor), s.mask.rows, kBlockKeys);
  transpose<V>(s.mask.rows, kBlockKeys, t.lanes, kBlockKeys, s.grad_scores, t.lanes);
}

// Leaves P^T (after dropout) and dS^T of the tile in scratch, unless the tile is skipped.
template <class V>
ScoredTile<V> score_gradient_tile(const BackwardParams& b, const Tile& t, BackwardScratch<V>& s) {
  const AttentionParams& p = b.attention;
  const ScoredTile<V> tile = score_tile<V>(p, t, s);
  if (!tile.visible) return tile;
  if (b.grad_weights.data != nullptr) {
    load_weights_gradient<V>(b, t, s);
  } else {
    const auto values = key_rows<V>(p.value, keys_of(p, t), p.value_dim, s.values);
    using Term = typename V::Term;
    const GemmOperands<typename V::Scalar, Term> g{
        values.data, values.ld, s.grad_columns, t.lanes, s.grad_scores, t.lanes, terms_in<Term>(p.value_dim)};
    pair_product<V>(t, s.mask.edge, g);
  }
  with_parts(s.mask, [&](auto parts) {
    using Parts = decltype(parts);
    p.dropout ? softmax_backward_tile<V, Parts, true>(p, t, s) : softmax_backward_tile<V, Parts, false>(p, t, s);
  });
  return tile;
}

// delta = rowsum(P dP): with delta still 0 a tile's dS^T is P^T dP^T.
template <class V>
void find_weights_delta(const BackwardParams& b, const QueryBlock& block, int64_t lanes, BackwardScratch<V>& s) {
  alignas(64) typename V::Scalar sums[kBlockQueries] = {};
  const int64_t num_keys = b.attention.num_keys;
  const bool undoes_softcap = s.undoes_softcap;
  s.undoes_softcap = false;
  const KeySpan keys = keys_to_visit(b.attention, block, kBlockKeys);
  for (int64_t begin = keys.begin; begin < keys.end; begin += kBlockKeys) {
    const Tile t{block, lanes, begin, min_of(kBlockKeys, num_keys - begin)};
    if (!score_gradient_tile<V>(b, t, s).visible) continue;
    for (int64_t k = 0; k < t.key_count; ++k) {
      for (int64_t c = 0; c < lanes; c += V::kWidth) {
        V::store(sums + c, V::load(sums + c) + V::load(s.grad_scores + k * lanes + c));
      }
    }
  }
  __builtin_memcpy(s.delta, sums, static_cast<size_t>(lanes) * sizeof(*sums));
  s.undoes_softcap = undoes_softcap;
}

// dQ, dK, dV of one tile over visible pairs only, for a tile that hides pairs and meets infinities or NaN.
template <class V>
void accumulate_visible_gradients(const AttentionParams& p, const Tile& t, Rows<typename V::Scalar> keys,
                                  typename V::Scalar* grad_key, typename V::Scalar* grad_value, BackwardScratch<V>& s) {
  const int64_t d_width = padded_width<V>(p.head_dim), dv_width = padded_width<V>(p.value_dim);
  using Scalar = typename V::Scalar;
  for (int64_t q = 0; q < t.queries.count; ++q) {
    for (int64_t d = 0; d < p.head_dim; ++d) {
      add_visible(
          s.grad_query[d * t.lanes + q], Scalar(1), t.key_count,
          [&](int64_t k) { return hides(s.mask, t.lanes, k, q); },
          [&](int64_t k) { return keys.data[k * keys.ld + d]; },
          [&](int64_t k) { return s.grad_scores[k * t.lanes + q]; });
    }
  }
  for (int64_t k = 0; k < t.key_count; ++k) {
    const auto hidden = [&](int64_t q) { return hides(s.mask, t.lanes, k, q); };
    for (int64_t d = 0; d < p.head_dim; ++d) {
      add_visible(
          grad_key[k * d_width + d], Scalar(1), t.queries.count, hidden,
          [&](int64_t q) { return s.grad_scores[k * t.lanes + q]; },
          [&](int64_t q) { return s.query_rows[q * d_width + d]; });
    }
    for (int64_t d = 0; d < p.value_dim; ++d) {
      add_visible(
          grad_value[k * dv_width + d], Scalar(1), t.queries.count, hidden,
          [&](int64_t q) { return s.scores[k * t.lanes + q]; },
          [&](int64_t q) { return s.grad_rows[q * dv_width + d]; });
    }
  }
}

// Of Q and dO of the block.
template <class V>
bool block_is_finite(const AttentionParams& p, int64_t lanes, BackwardScratch<V>& s) {
  if (s.finiteness == Finiteness::Unknown) {
    using NumberRows = Rows<typename V::Scalar>;
    const NumberRows queries{s.query_rows, padded_width<V>(p.head_dim)},
        grads{s.grad_rows, padded_width<V>(p.value_dim)};
    const bool found = any_nonfinite<V>(queries, lanes, p.head_dim) || any_nonfinite<V>(grads, lanes, p.value_dim);
    s.finiteness = found ? Finiteness::NotFinite : Finiteness::Finite;
  }
  return s.finiteness == Finiteness::Finite;
}

// The tile's rows of K as numbers.
template <class V>
Rows<typename V::Scalar> numbers_of(const AttentionParams& p, const Tile& t, const ScoredTile<V>& tile,
                                    BackwardScratch<V>& s) {
  if constexpr (V::kMultipliesPairs) {
    return key_rows<V>(p.key, keys_of(p, t), p.head_dim, s.key_numbers);
  } else {
    return tile.keys;
  }
}

template <class V>
void backward_tile(const BackwardParams& b, const Tile& t, int64_t key_in_range, BackwardScratch<V>& s) {
  using Scalar = typename V::Scalar;
  const AttentionParams& p = b.attention;
  const ScoredTile<V> tile = score_gradient_tile<V>(b, t, s);
  if (!tile.visible) return;
  const int64_t d = padded_width<V>(p.head_dim), dv = padded_width<V>(p.value_dim);
  Scalar* grad_key = s.grad_key + key_in_range * d;
  Scalar* grad_value = s.grad_value + key_in_range * dv;
  const TileEdge& edge = s.mask.edge;
  const Rows<Scalar> keys = numbers_of(p, t, tile, s);
  // A product over all pairs would make 0 * infinity of a hidden one.
  if (s.mask.hides_pairs && (!block_is_finite<V>(p, t.lanes, s) || any_nonfinite<V>(keys, t.key_count, p.head_dim))) {
    accumulate_visible_gradients<V>(p, t, keys, grad_key, grad_value, s);
    return;
  }
  using Operands = GemmOperands<Scalar>;
  key_sum<V, Start::Add>(t, edge,
                         Operands{keys.data, keys.ld, s.grad_scores, t.lanes, s.grad_query, t.lanes, t.key_count}, d);
  lane_sum<V>(t, edge, Operands{s.scores, t.lanes, s.grad_rows, dv, grad_value, dv, t.queries.count}, dv);
  lane_sum<V>(t, edge, Operands{s.grad_scores, t.lanes, s.query_rows, d, grad_key, d, t.queries.count}, d);
}

}  // namespace
}  // namespace mha_ext::kernels
