// The second pass of tangent_tile.inl.h: tangents of the gradients.
#pragma once

#include "backward_range.inl.h"
#include "mask_gradient.inl.h"
#include "tangent_tile.inl.h"

namespace mha_ext::kernels {
namespace {

// What a block of queries brings.
template <class V>
void load_tangent_block(const TangentParams& m, const QueryBlock& block, int64_t lanes, TangentScratch<V>& s) {
  using Scalar = typename V::Scalar;
  const AttentionParams& p = m.backward.attention;
  load_query_block<V>(m.backward, block, lanes, s);
  load_tangent<V>(m.query, block, lanes, p.head_dim, static_cast<Scalar>(p.scale), s.query_tangents,
                  s.query_tangent_columns);
  load_tangent<V>(m.grad_out, block, lanes, p.value_dim, Scalar(1), s.grad_tangents, s.grad_tangent_columns);
  load_row_numbers(m.moved_lse, p, block, lanes, s.moved_lse);
  load_row_numbers(m.moved_delta, p, block, lanes, s.moved_delta);
}

// dP^T and dP'^T of a tile.
template <class V>
void move_grad_probabilities(const TangentParams& m, const Tile& t, TangentScratch<V>& s) {
  const AttentionParams& p = m.backward.attention;
  const TileEdge& edge = s.mask.edge;
  const auto values = key_rows<V>(p.value, keys_of(p, t), p.value_dim, s.values);
  pair_product_onto<V>(t, edge, values, s.grad_columns, p.value_dim, false, s.grad_scores);
  const auto with_grad = [&] {
    pair_product_onto<V>(t, edge, values, s.grad_tangent_columns, p.value_dim, false, s.moved_grad_scores);
  };
  const auto with_value = [&](bool add) {
    const auto tangents = key_rows<V>(m.value, keys_of(p, t), p.value_dim, s.value_tangents);
    pair_product_onto<V>(t, edge, tangents, s.grad_columns, p.value_dim, add, s.moved_grad_scores);
  };
  sum_of_products<V>(m.grad_out.data != nullptr, with_grad, m.value.data != nullptr, with_value, t,
                     s.moved_grad_scores);
}

// From S^T, Z'^T, dP^T and dP'^T to P^T and P'^T after dropout, dZ^T and dZ'^T (or dS'^T, unless the softcap is
// undone).
template <class V, class Parts, bool kDropout>
void move_scores(const AttentionParams& p, const Tile& t, TangentScratch<V>& s) {
  using Vec = typename V::Vec;
  using Scalar = typename V::Scalar;
  const Tile tile = t;
  const MaskTile<Scalar> mask = s.mask;
  const Scalar *high = s.softmax.maximum, *low = s.softmax.sum, *delta = s.delta;
  const Scalar *moved_lse = s.moved_lse, *moved_delta = s.moved_delta;
  const Scalar* addend = s.moves_mask ? s.mask_tangent.addend : nullptr;
  Scalar *scores = s.scores, *motion = s.motion, *grad_scores = s.grad_scores, *moved_grads = s.moved_grad_scores;
  const uint64_t dropout = kDropout ? dropout_key(p, tile.queries.batch, tile.queries.head) : 0;
  const Scalar keep_scale = static_cast<Scalar>(p.keep_scale);
  const bool capped = p.softcap > 0, uncaps = capped && s.undoes_softcap;
  const Softcap<V> cap(p);
  for (int64_t k = 0; k < tile.key_count; ++k) {
    const DropoutRow<V> dropout_row(dropout, tile.key_begin + k);
    const MaskRow<Scalar> mask_row(mask, tile.lanes, k);
    for (int64_t c = 0; c < tile.lanes; c += V::kWidth) {
      const int64_t at = k * tile.lanes + c;
      if (Parts::kEdge && !mask.edge.template keys_seen<V>(tile, c).holds(k)) {
        V::store(scores + at, V::zero()), V::store(motion + at, V::zero());
        V::store(grad_scores + at, V::zero()), V::store(moved_grads + at, V::zero());
        continue;
      }
      const Vec capped_score = V::load(scores + at), moved_product = V::load(motion + at);
      const Vec slope = capped ? cap.slope(capped_score) : V::broadcast(1);
      Vec moved_score = moved_product * slope;
      if (addend != nullptr) moved_score += V::load(addend + at);
      Vec score = capped_score;
      typename V::IntVec hidden{};
      if (Parts::kAny) score = mask_vector<V, Parts>(mask_row, c, score, hidden);
      const Vec probability = probability_of<V, Parts::kAny>(score, V::load(high + c), V::load(low + c));
      const Vec moved = probability * (moved_score - V::load(moved_lse + c));
      Vec kept = probability, moved_kept = moved, grad = V::load(grad_scores + at),
          moved_grad = V::load(moved_grads + at);
      if (kDropout) {
        const auto keep = dropout_row.keep(tile.queries.begin + c, p.drop_below);
        const auto drop = [&](Vec x) { return V::select(keep, x * keep_scale, V::zero()); };
        kept = drop(kept), moved_kept = drop(moved_kept), grad = drop(grad), moved_grad = drop(moved_grad);
      }
      const Vec centred = grad - V::load(delta + c);
      grad = probability * centred;
      moved_grad = moved * centred + probability * (moved_grad - V::load(moved_delta + c));
      if (uncaps) {
        const Vec bend = (capped_score * cap.inverse) * (moved_product * cap.inverse) * Scalar(-2);
        moved_grad = (moved_grad + grad * bend) * slope;
        grad *= slope;
      }
      if (Parts::kAny) {
        const auto show = [&](Vec x) { return V::select(hidden, V::zero(), x); };
        moved_kept = show(moved_kept), grad = show(grad), moved_grad = show(moved_grad);
      }
      V::store(scores + at, kept);
      V::store(motion + at, moved_kept);
      V::store(grad_scores + at, grad);
      V::store(moved_grads + at, moved_grad);
    }
  }
}

// Leaves all that in scratch, unless the tile is skipped.
template <class V>
ScoredTile<V> moved_score_tile(const TangentParams& m, const Tile& t, TangentScratch<V>& s) {
  const AttentionParams& p = m.backward.attention;
  const ScoredTile<V> tile = score_tile<V>(p, t, s);
  if (!tile.visible) return tile;
  move_products<V>(m, t, tile.keys, s);
  move_grad_probabilities<V>(m, t, s);
  with_parts(s.mask, [&](auto parts) {
    using Parts = decltype(parts);
    p.dropout ? move_scores<V, Parts, true>(p, t, s) : move_scores<V, Parts, false>(p, t, s);
  });
  return tile;
}

template <class V>
void tangent_backward_tile(const TangentParams& m, const Tile& t, int64_t key_in_range, TangentScratch<V>& s) {
  using Scalar = typename V::Scalar;
  using Operands = GemmOperands<Scalar>;
  const AttentionParams& p = m.backward.attention;
  const ScoredTile<V> tile = moved_score_tile<V>(m, t, s);
  if (!tile.visible) return;
  const int64_t d = padded_width<V>(p.head_dim), dv = padded_width<V>(p.value_dim);
  const TileEdge& edge = s.mask.edge;
  const auto add_query = [&](const Rows<Scalar>& keys, const Scalar* grads) {
    key_sum<V, Start::Add>(t, edge, Operands{keys.data, keys.ld, grads, t.lanes, s.grad_query, t.lanes, t.key_count},
                           d);
  };
  const auto add_rows = [&](const Scalar* pairs, const Scalar* rows, int64_t width, Scalar* sums) {
    lane_sum<V>(t, edge, Operands{pairs, t.lanes, rows, width, sums + key_in_range * width, width, t.queries.count},
                width);
  };
  add_query(tile.keys, s.moved_grad_scores);
  add_rows(s.motion, s.grad_rows, dv, s.grad_value);
  add_rows(s.moved_grad_scores, s.query_rows, d, s.grad_key);
  if (m.key.data != nullptr) {
    add_query(key_rows<V>(m.key, keys_of(p, t), p.head_dim, s.key_tangents), s.grad_scores);
  }
  if (m.grad_out.data != nullptr) add_rows(s.scores, s.grad_tangents, dv, s.grad_value);
  if (m.query.data != nullptr) add_rows(s.grad_scores, s.query_tangents, d, s.grad_key);
}

template <class V>
void tangent_backward_range(const TangentParams& m, const KeyRange& range, void* scratch) {
  TangentScratch<V> s(Arena(scratch), m.backward.attention, range.end - range.begin);
  s.undoes_softcap = true;
  gradients_of_range<V>(
      m.backward, range, s, [&](const QueryBlock& block, int64_t lanes) { load_tangent_block<V>(m, block, lanes, s); },
      [&](const Tile& t, int64_t key_in_range) { tangent_backward_tile<V>(m, t, key_in_range, s); });
}

template <class V>
size_t tangent_backward_scratch_bytes(const AttentionParams& p, int64_t range_keys) {
  return TangentScratch<V>(Arena(nullptr), p, range_keys).bytes;
}

// Adds dS' of one block of queries against keys [key_begin, key_end).
template <class V>
void tangent_mask_gradient_block(const TangentParams& m, const QueryBlock& block, int64_t key_begin, int64_t key_end,
                                 const MaskGradientView& out, void* scratch) {
  TangentScratch<V> s(Arena(scratch), m.backward.attention, 0);
  load_tangent_block<V>(m, block, round_up(block.count, V::kWidth), s);
  add_mask_gradients<V>(m.backward.attention, block, {key_begin, key_end}, out, [&](const Tile& t) {
    return moved_score_tile<V>(m, t, s).visible ? s.moved_grad_scores : nullptr;
  });
}

}  // namespace
}  // namespace mha_ext::kernels
