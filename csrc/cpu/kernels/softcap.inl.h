// The soft limit of scores, softcap tanh(score / softcap) (Gemma 2, 2024).
#pragma once

#include "softmax.inl.h"

namespace mha_ext::kernels {
namespace {

// Near 0 the continued fraction x / (1 + x^2 / (3 + x^2 / (5 + ...))) down to 15 (Lambert 1770), written as a quotient:
// up to kNearZero it is off by 6e-18 of tanh x. Beyond, (1 - exp(-2x)) / (1 + exp(-2x)) loses nothing.
template <class V>
MHA_EXT_INLINE typename V::Vec tanh_of(typename V::Vec x) {
  using Vec = typename V::Vec;
  using Scalar = typename V::Scalar;
  constexpr Scalar kNearZero = Scalar(0.625);
  const Vec size = V::max(x, -x), y = x * x;
  const Vec rest = exp_of<V>(size * Scalar(-2));
  const Vec far = V::select(x < Scalar(0), rest - Scalar(1), Scalar(1) - rest);
  const Vec near = x * (((y * Scalar(36) + Scalar(6930)) * y + Scalar(270270)) * y + Scalar(2027025));
  const Vec below = (((y + Scalar(630)) * y + Scalar(51975)) * y + Scalar(945945)) * y + Scalar(2027025);
  const auto is_near = size < kNearZero;
  return V::select(is_near, near, far) / V::select(is_near, below, Scalar(1) + rest);
}

template <class V>
struct Softcap {
  using Scalar = typename V::Scalar;
  using Vec = typename V::Vec;
  Scalar cap, inverse;

  explicit Softcap(const AttentionParams& p) : cap(static_cast<Scalar>(p.softcap)), inverse(Scalar(1) / cap) {}
  MHA_EXT_INLINE Vec operator()(Vec score) const { return tanh_of<V>(score * inverse) * cap; }
  // d(capped) / d(score), from what was capped
  MHA_EXT_INLINE Vec slope(Vec capped) const { return Scalar(1) - (capped * inverse) * (capped * inverse); }
};

// Scores of a tile, [key][lane].
template <class V>
void cap_scores(const AttentionParams& p, const Tile& t, const TileEdge& edge, typename V::Scalar* scores) {
  const Softcap<V> cap(p);
  for (int64_t c = 0; c < t.lanes; c += V::kWidth) {
    const KeySpan keys = edge.keys_seen<V>(t, c);
    for (int64_t k = keys.begin; k < keys.end; ++k) {
      typename V::Scalar* score = scores + k * t.lanes + c;
      V::store(score, cap(V::load(score)));
    }
  }
}

}  // namespace
}  // namespace mha_ext::kernels
