// Gradients of float masks and of the relative bias, from dS recomputed tile by tile.
#pragma once

#include "backward_tile.inl.h"

namespace mha_ext::kernels {
namespace {

template <class V>
void add_mask_gradient(const Tile& t, const typename V::Scalar* grad_scores, typename V::Scalar* first,
                       const MaskGradientView& out) {
  const int64_t whole = out.stride_q == 1 ? t.queries.count / V::kWidth * V::kWidth : 0;
  for (int64_t k = 0; k < t.key_count && whole > 0; ++k) {
    typename V::Scalar* sums = first + k * out.stride_k;
    for (int64_t q = 0; q < whole; q += V::kWidth) {
      V::store(sums + q, V::load(sums + q) + V::load(grad_scores + k * t.lanes + q));
    }
  }
  for (int64_t q = whole; q < t.queries.count; ++q) {
    typename V::Scalar* row = first + q * out.stride_q;
    for (int64_t k = 0; k < t.key_count; ++k) row[k * out.stride_k] += grad_scores[k * t.lanes + q];
  }
}

// d(mask) = dS summed over the axes along which the mask is broadcast. grads_of(tile) gives dS^T, or null where no pair
// is visible.
template <class V, class GradsOf>
void add_mask_gradients(const AttentionParams& p, const QueryBlock& block, const KeySpan& keys,
                        const MaskGradientView& out, const GradsOf& grads_of) {
  using Scalar = typename V::Scalar;
  const int64_t lanes = round_up(block.count, V::kWidth);
  Scalar* base = static_cast<Scalar*>(out.data) + block.batch * out.stride_b + block.head * out.stride_h +
                 block.begin * out.stride_q;
  const KeySpan seen = keys_to_visit(p, block, kBlockKeys);
  for (int64_t begin = max_of(keys.begin, seen.begin); begin < min_of(keys.end, seen.end); begin += kBlockKeys) {
    const Tile t{block, lanes, begin, min_of(kBlockKeys, keys.end - begin)};
    if (const Scalar* grads = grads_of(t)) add_mask_gradient<V>(t, grads, base + begin * out.stride_k, out);
  }
}

template <class V>
void mask_gradient_block(const BackwardParams& b, const QueryBlock& block, int64_t key_begin, int64_t key_end,
                         const MaskGradientView& out, void* scratch) {
  BackwardScratch<V> s(Arena(scratch), b.attention, 0);
  const int64_t lanes = round_up(block.count, V::kWidth);
  load_query_block<V>(b, block, lanes, s);
  if (b.grad_weights.data != nullptr) find_weights_delta<V>(b, block, lanes, s);
  add_mask_gradients<V>(b.attention, block, {key_begin, key_end}, out, [&](const Tile& t) {
    return score_gradient_tile<V>(b, t, s).visible ? s.grad_scores : nullptr;
  });
}

template <class V>
size_t mask_gradient_scratch_bytes(const AttentionParams& p) {
  return BackwardScratch<V>(Arena(nullptr), p, 0).bytes;
}

}  // namespace
}  // namespace mha_ext::kernels
