// Derivatives along tangents of the inputs, with one more set of rows beside those of forward and backward. A dot marks
// what a tangent moves something by; S, P, dP, dS and delta are as in backward_tile.inl.h, C is the softcap's slope.
//   Z'^T  = K (scale Q')^T + K' (scale Q)^T       S' = C Z' plus the masks' tangents
//   P'    = P (S' - lse')                         lse'[q] = sum_k P S'
//   O'^T += V^T (P S')^T + V'^T P^T               less lse' O once all keys are summed
// and of the backward, after that:
//   dP'^T = V dO'^T + V' dO^T
//   dS'   = P' (dP - delta) + P (dP' - delta')    delta'[q] = rowsum(dO' O + dO O') - dlse'
//   dZ    = C dS, dZ' = C dS' + C' dS
//   dQ'^T += K^T dZ'^T + K'^T dZ^T    dK' += dZ'^T (scale Q) + dZ^T (scale Q')    dV' += P'^T dO + P^T dO'
// All operands are finite: where a tile hides pairs, 0 times what is behind them is 0. Of numbers, not of pairs of
// bfloat16, which are widened.
#pragma once

#include "backward_tile.inl.h"

namespace mha_ext::kernels {
namespace {

template <class V>
struct TangentScratch : BackwardScratch<V> {
  using Scalar = typename V::Scalar;
  Scalar *query_tangents, *query_tangent_columns;  // scale Q', as Q
  Scalar *grad_tangents, *grad_tangent_columns;    // dO', as dO
  Scalar *key_tangents, *value_tangents;           // of a tile, where they are copied
  Scalar* motion;                                  // Z'^T, then P S' or P', after dropout
  Scalar* moved_grad_scores;                       // dP'^T, then dZ'^T or dS'^T
  Scalar *moved_lse, *moved_delta;
  MaskTile<Scalar> mask_tangent;
  bool moves_mask = false;

  TangentScratch(Arena&& arena, const AttentionParams& p, int64_t range_keys)
      : BackwardScratch<V>(static_cast<Arena&&>(arena), p, range_keys) {
    const int64_t d = padded_width<V>(p.head_dim), dv = padded_width<V>(p.value_dim);
    query_tangents = arena.take<Scalar>(kBlockQueries * d);
    query_tangent_columns = arena.take<Scalar>(kBlockQueries * d);
    grad_tangents = arena.take<Scalar>(kBlockQueries * dv);
    grad_tangent_columns = arena.take<Scalar>(kBlockQueries * dv);
    key_tangents = arena.take<Scalar>(kBlockKeys * d);
    value_tangents = arena.take<Scalar>(kBlockKeys * dv);
    motion = arena.take<Scalar>(kBlockKeys * kBlockQueries);
    moved_grad_scores = arena.take<Scalar>(kBlockKeys * kBlockQueries);
    moved_lse = arena.take<Scalar>(kBlockQueries);
    moved_delta = arena.take<Scalar>(kBlockQueries);
    mask_tangent.addend = arena.take<Scalar>(kBlockKeys * kBlockQueries);
    mask_tangent.rows = arena.take<Scalar>(kBlockKeys * kBlockQueries);
    mask_tangent.hidden = this->mask.hidden;  // float masks hide nothing here
    mask_tangent.hidden_rows = this->mask.hidden_rows;
    mask_tangent.turned = arena.take<Scalar>(kBlockKeys * kBlockQueries);
    this->bytes = arena.used();
  }
};

// Rows of a tangent and their columns; nothing where there is no tangent.
template <class V>
void load_tangent(const TensorView& tangent, const QueryBlock& block, int64_t lanes, int64_t cols,
                  typename V::Scalar scale, typename V::Scalar* rows, typename V::Scalar* columns) {
  if (tangent.data == nullptr) return;
  const int64_t width = padded_width<V>(cols);
  read_rows<V>(tangent, block, lanes, cols, scale, rows, width);
  transpose<V>(rows, width, lanes, width, columns, lanes);
}

// A number a query, 0 for padding lanes.
template <typename Scalar>
void load_row_numbers(const void* numbers, const AttentionParams& p, const QueryBlock& block, int64_t lanes,
                      Scalar* dst) {
  const int64_t row = (block.batch * p.heads + block.head) * p.num_queries + block.begin;
  for (int64_t q = 0; q < lanes; ++q) {
    dst[q] = numbers != nullptr && q < block.count ? static_cast<const Scalar*>(numbers)[row + q] : Scalar(0);
  }
}

// One of two products of a tile with tangents, left and right, is there, or both, or none.
template <class V, class First, class Second>
void sum_of_products(bool has_first, const First& first, bool has_second, const Second& second, const Tile& t,
                     typename V::Scalar* sum) {
  if (has_first) first();
  if (has_second) second(has_first);
  if (!has_first && !has_second) {
    __builtin_memset(sum, 0, static_cast<size_t>(t.key_count * t.lanes) * sizeof(*sum));
  }
}

// rows columns^T + row_tangents column_tangents^T where `add` is set, in `out`.
template <class V>
void pair_product_onto(const Tile& t, const TileEdge& edge, Rows<typename V::Scalar> rows,
                       const typename V::Scalar* columns, int64_t depth, bool add, typename V::Scalar* out) {
  const GemmOperands<typename V::Scalar> g{rows.data, rows.ld, columns, t.lanes, out, t.lanes, depth};
  add ? pair_product<V, Start::Add>(t, edge, g) : pair_product<V>(t, edge, g);
}

// Z'^T of a tile, and its masks' tangents in scratch.
template <class V>
void move_products(const TangentParams& m, const Tile& t, Rows<typename V::Scalar> keys, TangentScratch<V>& s) {
  const AttentionParams& p = m.backward.attention;
  const TileEdge& edge = s.mask.edge;
  const auto with_query = [&] {
    pair_product_onto<V>(t, edge, keys, s.query_tangent_columns, p.head_dim, false, s.motion);
  };
  const auto with_key = [&](bool add) {
    const auto tangents = key_rows<V>(m.key, keys_of(p, t), p.head_dim, s.key_tangents);
    pair_product_onto<V>(t, edge, tangents, s.query_columns, p.head_dim, add, s.motion);
  };
  sum_of_products<V>(m.query.data != nullptr, with_query, m.key.data != nullptr, with_key, t, s.motion);
  resolve_mask<V>(m.mask_tangents, t, s.mask_tangent);
  s.moves_mask = s.mask_tangent.has_addends;
}

// From S^T and Z'^T to P^T and (P S')^T of visible pairs, after dropout; adds to lse'.
template <class V, class Parts, bool kDropout>
void move_probabilities(const AttentionParams& p, const Tile& t, TangentScratch<V>& s) {
  using Vec = typename V::Vec;
  using Scalar = typename V::Scalar;
  const Tile tile = t;
  const MaskTile<Scalar> mask = s.mask;
  const Scalar *high = s.softmax.maximum, *low = s.softmax.sum;
  const Scalar* addend = s.moves_mask ? s.mask_tangent.addend : nullptr;
  Scalar *scores = s.scores, *motion = s.motion;
  alignas(64) Scalar sums[kBlockQueries] = {};
  const uint64_t dropout = kDropout ? dropout_key(p, tile.queries.batch, tile.queries.head) : 0;
  const Scalar keep_scale = static_cast<Scalar>(p.keep_scale);
  const bool capped = p.softcap > 0;
  const Softcap<V> cap(p);
  for (int64_t k = 0; k < tile.key_count; ++k) {
    const DropoutRow<V> dropout_row(dropout, tile.key_begin + k);
    const MaskRow<Scalar> mask_row(mask, tile.lanes, k);
    for (int64_t c = 0; c < tile.lanes; c += V::kWidth) {
      const int64_t at = k * tile.lanes + c;
      if (Parts::kEdge && !mask.edge.template keys_seen<V>(tile, c).holds(k)) {
        V::store(scores + at, V::zero());
        V::store(motion + at, V::zero());
        continue;
      }
      Vec score = V::load(scores + at), moved = V::load(motion + at);
      if (capped) moved *= cap.slope(score);
      if (addend != nullptr) moved += V::load(addend + at);
      typename V::IntVec hidden{};
      if (Parts::kAny) score = mask_vector<V, Parts>(mask_row, c, score, hidden);
      Vec probability = probability_of<V, Parts::kAny>(score, V::load(high + c), V::load(low + c));
      moved *= probability;
      if (Parts::kAny) moved = V::select(hidden, V::zero(), moved);
      V::store(sums + c, V::load(sums + c) + moved);
      if (kDropout) {
        const auto keep = dropout_row.keep(tile.queries.begin + c, p.drop_below);
        probability = V::select(keep, probability * keep_scale, V::zero());
        moved = V::select(keep, moved * keep_scale, V::zero());
      }
      V::store(scores + at, probability);
      V::store(motion + at, moved);
    }
  }
  for (int64_t c = 0; c < tile.lanes; c += V::kWidth) {
    V::store(s.moved_lse + c, V::load(s.moved_lse + c) + V::load(sums + c));
  }
}

// Adds a tile's keys to O'^T, which lies where a backward has dQ^T.
template <class V>
void tangent_tile(const TangentParams& m, const Tile& t, typename V::Scalar* sum, TangentScratch<V>& s) {
  using Operands = GemmOperands<typename V::Scalar>;
  const AttentionParams& p = m.backward.attention;
  const ScoredTile<V> tile = score_tile<V>(p, t, s);
  if (!tile.visible) return;
  move_products<V>(m, t, tile.keys, s);
  with_parts(s.mask, [&](auto parts) {
    using Parts = decltype(parts);
    p.dropout ? move_probabilities<V, Parts, true>(p, t, s) : move_probabilities<V, Parts, false>(p, t, s);
  });
  const TileEdge& edge = s.mask.edge;
  const int64_t width = padded_width<V>(p.value_dim);
  const auto values = key_rows<V>(p.value, keys_of(p, t), p.value_dim, s.values);
  key_sum<V, Start::Add>(t, edge, Operands{values.data, values.ld, s.motion, t.lanes, sum, t.lanes, t.key_count},
                         width);
  if (m.value.data == nullptr) return;
  const auto tangents = key_rows<V>(m.value, keys_of(p, t), p.value_dim, s.value_tangents);
  key_sum<V, Start::Add>(t, edge, Operands{tangents.data, tangents.ld, s.scores, t.lanes, sum, t.lanes, t.key_count},
                         width);
}

// The sink's share of lse', O' less lse' O, and out they go.
template <class V>
void finish_tangent(const TangentParams& m, const QueryBlock& block, int64_t lanes, const typename V::Scalar* sum,
                    TangentScratch<V>& s) {
  using Scalar = typename V::Scalar;
  const AttentionParams& p = m.backward.attention;
  const int64_t width = padded_width<V>(p.value_dim);
  transpose<V>(sum, lanes, width, lanes, s.grad_tangents, width);
  read_output<V>(m.backward, block, lanes, s.out_rows, width);
  auto* lse = static_cast<Scalar*>(m.moved_lse) + (block.batch * p.heads + block.head) * p.num_queries + block.begin;
  for (int64_t q = 0; q < block.count; ++q) {
    if (m.sink_tangent != nullptr) {
      const Scalar logit = first_maximum<V>(p, block.batch, block.head);
      const auto share = exp_of<V>(V::broadcast((logit - s.softmax.maximum[q]) - s.softmax.sum[q]));
      s.moved_lse[q] +=
          share[0] * static_cast<const Scalar*>(m.sink_tangent)[block.batch * p.sink_stride_b + block.head];
    }
    lse[q] = s.moved_lse[q];
    Scalar* row = s.grad_tangents + q * width;
    for (int64_t c = 0; c < width; c += V::kWidth) {
      V::store(row + c, V::load(row + c) - V::load(s.out_rows + q * width + c) * s.moved_lse[q]);
    }
  }
  write_rows(m.moved_out, block, p.value_dim, s.grad_tangents, width);
}

// out' and lse' of one block of queries.
template <class V>
void tangent_block(const TangentParams& m, const QueryBlock& block, void* scratch) {
  using Scalar = typename V::Scalar;
  const AttentionParams& p = m.backward.attention;
  TangentScratch<V> s(Arena(scratch), p, 0);
  const int64_t lanes = round_up(block.count, V::kWidth);
  load_query_rows<V>(p, block, lanes, s);
  load_tangent<V>(m.query, block, lanes, p.head_dim, static_cast<Scalar>(p.scale), s.query_tangents,
                  s.query_tangent_columns);
  load_lse<V>(m.backward.lse, p, block, lanes, s);
  __builtin_memset(s.moved_lse, 0, static_cast<size_t>(lanes) * sizeof(Scalar));
  Scalar* sum = s.grad_tangent_columns;
  __builtin_memset(sum, 0, static_cast<size_t>(padded_width<V>(p.value_dim) * lanes) * sizeof(Scalar));
  const KeySpan keys = keys_to_visit(p, block, kBlockKeys);
  for (int64_t k = keys.begin; k < keys.end; k += kBlockKeys) {
    tangent_tile<V>(m, {block, lanes, k, min_of(kBlockKeys, p.num_keys - k)}, sum, s);
  }
  finish_tangent<V>(m, block, lanes, sum, s);
}

template <class V>
size_t tangent_scratch_bytes(const AttentionParams& p) {
  return TangentScratch<V>(Arena(nullptr), p, 0).bytes;
}

}  // namespace
}  // namespace mha_ext::kernels
