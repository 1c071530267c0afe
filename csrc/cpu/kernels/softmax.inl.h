// exp, and the online softmax (Milakov & Gimelshein 2018) with one query a lane.
#pragma once

#include "tile.inl.h"

namespace mha_ext::kernels {
namespace {

template <typename Scalar>
struct ExpConstants;

// ln 2 is split so that n * kLn2High is exact for every n that occurs (Cody & Waite 1980).
// exp(r) on |r| <= ln(2)/2: 1 + r + r^2 * q(r), q fitted (Remez) for the least relative error of
// the whole: 3.1e-9 before rounding. One term fewer gives 1.0e-7.
template <>
struct ExpConstants<float> {
  static constexpr float kLog2e = 1.44269504f, kLn2High = 0.693359375f, kLn2Low = -2.12194440e-4f;
  static constexpr float kFloor = -87.3f;  // exp below is less than the smallest normal number, and taken as 0
  static constexpr int kTerms = 5;
  static constexpr float kSeries[kTerms] = {0.499999934478f, 0.166665206317f, 0.0416683880453f, 0.00836871687973f,
                                            0.00138145986467f};
};

// Taylor terms 1/2! ... 1/13!: the first one left out is below 5e-18.
template <>
struct ExpConstants<double> {
  static constexpr double kLog2e = 1.4426950408889634, kLn2High = 6.93147180369123816490e-01,
                          kLn2Low = 1.90821492927058770002e-10;
  static constexpr double kFloor = -708.3;
  static constexpr int kTerms = 12;
  static constexpr double kSeries[kTerms] = {1.0 / 2,       1.0 / 6,        1.0 / 24,        1.0 / 120,
                                             1.0 / 720,     1.0 / 5040,     1.0 / 40320,     1.0 / 362880,
                                             1.0 / 3628800, 1.0 / 39916800, 1.0 / 479001600, 1.0 / 6227020800};
};

// exp(x) for x <= 0 (a little above is fine). -inf gives 0, NaN gives NaN.
template <class V>
MHA_EXT_INLINE typename V::Vec exp_of(typename V::Vec x) {
  using Vec = typename V::Vec;
  using C = ExpConstants<typename V::Scalar>;
  const Vec shifted = x * C::kLog2e + V::Format::kRoundToInteger;
  const Vec n = shifted - V::Format::kRoundToInteger;
  const Vec r = (x - n * C::kLn2High) - n * C::kLn2Low;
  Vec q = V::broadcast(C::kSeries[C::kTerms - 1]);
#pragma GCC unroll 16
  for (int i = C::kTerms - 2; i >= 0; --i) q = q * r + C::kSeries[i];
  const Vec p = (q * r) * r + (r + typename V::Scalar(1));
  return V::select(x < C::kFloor, V::zero(), V::scale_by_power_of_two(p, shifted, n));
}

// exp((score - high) - low), high + low the log-sum-exp. A hidden pair (score -inf) has none of it, not even in a row
// whose log-sum-exp a visible NaN has made NaN.
template <class V, bool kMayHide>
MHA_EXT_INLINE typename V::Vec probability_of(typename V::Vec score, typename V::Vec high, typename V::Vec low) {
  const typename V::Vec probability = exp_of<V>((score - high) - low);
  return kMayHide ? V::select(score == -V::kInfinity, V::zero(), probability) : probability;
}

// The running state of a block of queries: O = accumulator / sum, log-sum-exp = maximum + log(sum).
template <typename Scalar>
struct RunningSoftmax {
  Scalar* maximum;
  Scalar* sum;
  Scalar* rescale;  // factor that the accumulator must take before the next tile is added
};

// What the softmax of a head's rows starts from: nothing, or its sink, which is like a key of that score.
template <class V>
MHA_EXT_INLINE typename V::Scalar first_maximum(const AttentionParams& p, int64_t batch, int64_t head) {
  return p.sink == nullptr ? -V::kInfinity
                           : static_cast<const typename V::Scalar*>(p.sink)[batch * p.sink_stride_b + head];
}

template <typename Scalar>
MHA_EXT_INLINE Scalar first_sum(Scalar first_maximum) {
  return first_maximum == -FloatFormat<Scalar>::kInfinity ? Scalar(0) : Scalar(1);
}

template <class V>
void clear(const AttentionParams& p, const QueryBlock& block, const RunningSoftmax<typename V::Scalar>& state,
           int64_t lanes) {
  const auto maximum = first_maximum<V>(p, block.batch, block.head), sum = first_sum(maximum);
  for (int64_t q = 0; q < lanes; ++q) {
    state.maximum[q] = maximum;
    state.sum[q] = sum;
  }
}

// What a score is measured against. A row that has seen no visible key has maximum -inf, and -inf - (-inf) would be
// NaN: such a row is measured against 0, so that all its exponentials are 0. This is the one place of that rule.
template <class V>
MHA_EXT_INLINE typename V::Vec finite_reference(typename V::Vec maximum) {
  return V::select(maximum == -V::kInfinity, V::zero(), maximum);
}

// A score as products by tiles leave it lacks a factor; others have it. Rounded by itself, the largest score of a row
// is its maximum to the bit, and its weight 1.
template <class V>
MHA_EXT_INLINE typename V::Vec with_factor(typename V::Vec score, typename V::Scalar factor) {
  if constexpr (V::kMultipliesTiles) {
    return V::rounded_product(score, V::broadcast(factor));
  } else {
    return score;
  }
}

// A weight as products by tiles can take it whole, which is as two numbers of 8 bits: rounded to 16 (Veltkamp 1968).
// Its row's sum takes it so too: the output is then the mean of V by those weights, and exact where one has nearly all.
template <class V>
MHA_EXT_INLINE typename V::Vec as_weight(typename V::Vec p) {
  if constexpr (V::kMultipliesTiles) {
    return V::rounded_product(p, V::broadcast(257)) - p * 256;
  } else {
    return p;
  }
}

// scores [key][lane] -> exp(score - maximum), and the running maximum, sum and rescale factors brought up to date.
// `factor` is what the scores lack: positive.
template <class V>
void softmax_tile(const Tile& t, const TileEdge& edge, typename V::Scalar factor, typename V::Scalar* scores,
                  const RunningSoftmax<typename V::Scalar>& state) {
  using Vec = typename V::Vec;
  using Scalar = typename V::Scalar;
  const int64_t ld = t.lanes;
  for (int64_t c = 0; c < t.lanes; c += V::kWidth) {
    const KeySpan keys = edge.keys_seen<V>(t, c);
    if (keys.empty()) {
      V::store(state.rescale + c, V::broadcast(1));
      continue;
    }
    const Vec before = V::load(state.maximum + c);
    const Vec start = V::kMultipliesTiles ? V::broadcast(-V::kInfinity) : before;
    Vec m0 = start, m1 = start;
    int64_t k = keys.begin;
    for (; k + 2 <= keys.end; k += 2) {
      m0 = V::max(m0, V::load(scores + k * ld + c));
      m1 = V::max(m1, V::load(scores + (k + 1) * ld + c));
    }
    if (k < keys.end) m0 = V::max(m0, V::load(scores + k * ld + c));
    const Vec maximum = V::kMultipliesTiles ? V::max(with_factor<V>(V::max(m0, m1), factor), before) : V::max(m0, m1);
    const Vec reference = finite_reference<V>(maximum);
    Vec sums[4] = {V::zero(), V::zero(), V::zero(), V::zero()};
    const auto exponentiate = [&](Scalar* score, Vec& sum) {
      const Vec p = as_weight<V>(exp_of<V>(with_factor<V>(V::load(score), factor) - reference));
      V::store(score, p);
      sum += p;
    };
    for (k = keys.begin; k + 4 <= keys.end; k += 4) {
      for (int i = 0; i < 4; ++i) exponentiate(scores + (k + i) * ld + c, sums[i]);
    }
    for (; k < keys.end; ++k) exponentiate(scores + k * ld + c, sums[k % 4]);
    const Vec sum = (sums[0] + sums[1]) + (sums[2] + sums[3]);
    const Vec rescale = exp_of<V>(before - reference);
    V::store(state.maximum + c, maximum);
    V::store(state.rescale + c, rescale);
    V::store(state.sum + c, V::load(state.sum + c) * rescale + sum);
  }
}

}  // namespace
}  // namespace mha_ext::kernels
