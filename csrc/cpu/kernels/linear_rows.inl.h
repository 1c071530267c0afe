// The linear map of a few rows. There is nothing to gain from tiles: each weight is read once from memory, as it lies,
// and lanes run along the sum. As many sums as there are lanes are kept at once, so that adding up their lanes takes
// two shuffles a sum.
#pragma once

#include "linear_rows.h"
#include "simd.inl.h"

namespace mha_ext::kernels {
namespace {

// Lane i of the result is the sum of the lanes of sums[i]. Each halving leaves the lanes of two vectors by turns in
// one; with partners half of the vectors apart they end up in order.
template <class V>
MHA_EXT_INLINE typename V::Vec add_lanes(typename V::Vec (&sums)[V::kWidth]) {
#pragma GCC unroll 4
  for (int count = V::kWidth / 2; count > 0; count /= 2) {
#pragma GCC unroll 8
    for (int i = 0; i < count; ++i) {
      const typename V::Vec a = sums[i], b = sums[i + count];
      sums[i] = V::interleave_low(a, b) + V::interleave_high(a, b);
    }
  }
  return sums[0];
}

// Columns [begin, begin + count) of the result, count <= V::kWidth.
template <class V>
MHA_EXT_INLINE void linear_rows_block(const LinearRows& p, int64_t begin, int64_t count) {
  using Scalar = typename V::Scalar;
  const Scalar* weights[V::kWidth];
  for (int i = 0; i < V::kWidth; ++i) {
    const int64_t column = begin + min_of(i, count - 1);
    weights[i] = static_cast<const Scalar*>(p.weight) + column * p.weight_stride;
  }
  const int64_t whole = p.depth / V::kWidth * V::kWidth;
  for (int64_t m = 0; m < p.rows; ++m) {
    const Scalar* x = static_cast<const Scalar*>(p.input) + m * p.input_stride;
    typename V::Vec sums[V::kWidth];
#pragma GCC unroll 16
    for (int i = 0; i < V::kWidth; ++i) sums[i] = V::zero();
    for (int64_t k = 0; k < whole; k += V::kWidth) {
      const typename V::Vec lanes = V::load(x + k);
#pragma GCC unroll 16
      for (int i = 0; i < V::kWidth; ++i) sums[i] += V::load(weights[i] + k) * lanes;
    }
    Scalar result[V::kWidth];
    V::store(result, add_lanes<V>(sums));
    Scalar* out = static_cast<Scalar*>(p.out) + m * p.out_stride + begin;
    for (int64_t i = 0; i < count; ++i) {
      Scalar sum = p.bias == nullptr ? Scalar(0) : static_cast<const Scalar*>(p.bias)[begin + i];
      for (int64_t k = whole; k < p.depth; ++k) sum += weights[i][k] * x[k];
      out[i] = sum + result[i];
    }
  }
}

template <class V>
void linear_rows(const LinearRows& p, int64_t begin, int64_t end) {
  for (int64_t column = begin; column < end; column += V::kWidth) {
    linear_rows_block<V>(p, column, min_of(V::kWidth, end - column));
  }
}

}  // namespace
}  // namespace mha_ext::kernels
