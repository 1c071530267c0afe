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

// Of kRows rows from `row` on, `count` outputs from `begin` on, at most as many as sums are free.
template <class V, int kRows>
MHA_EXT_INLINE void linear_rows_block(const LinearRows& p, int64_t row, int64_t begin, int64_t count) {
  using Scalar = typename V::Scalar;
  constexpr int kOutputs = V::kWidth / kRows;
  const Scalar* weights[kOutputs];
  for (int i = 0; i < kOutputs; ++i) {
    weights[i] = static_cast<const Scalar*>(p.weight) + (begin + min_of(i, count - 1)) * p.weight_stride;
  }
  const Scalar* input = static_cast<const Scalar*>(p.input) + row * p.input_stride;
  const int64_t whole = p.depth / V::kWidth * V::kWidth, stride = p.input_stride;
  typename V::Vec sums[V::kWidth];
#pragma GCC unroll 16
  for (int i = 0; i < V::kWidth; ++i) sums[i] = V::zero();
  for (int64_t k = 0; k < whole; k += V::kWidth) {
    typename V::Vec lanes[kRows];
#pragma GCC unroll 8
    for (int m = 0; m < kRows; ++m) lanes[m] = V::load(input + m * stride + k);
#pragma GCC unroll 16
    for (int i = 0; i < kOutputs; ++i) {
      const typename V::Vec weight = V::load(weights[i] + k);
#pragma GCC unroll 8
      for (int m = 0; m < kRows; ++m) sums[i * kRows + m] += weight * lanes[m];
    }
  }
  Scalar result[V::kWidth];
  V::store(result, add_lanes<V>(sums));
  for (int m = 0; m < kRows; ++m) {
    Scalar* out = static_cast<Scalar*>(p.out) + (row + m) * p.out_stride + begin;
    for (int64_t i = 0; i < count; ++i) {
      Scalar sum = p.bias == nullptr ? Scalar(0) : static_cast<const Scalar*>(p.bias)[begin + i];
      for (int64_t k = whole; k < p.depth; ++k) sum += weights[i][k] * input[m * stride + k];
      out[i] = sum + result[i * kRows + m];
    }
  }
}

template <class V, int kRows>
__attribute__((noinline)) void linear_rows_of(const LinearRows& p, int64_t row, int64_t begin, int64_t end) {
  constexpr int64_t kOutputs = V::kWidth / kRows;
  for (; begin < end; begin += kOutputs) linear_rows_block<V, kRows>(p, row, begin, min_of(kOutputs, end - begin));
}

// Rows from `row` on, as many at a time as there are up to kRows.
template <class V, int kRows>
void linear_rows_from(const LinearRows& p, int64_t row, int64_t begin, int64_t end) {
  for (; row + kRows <= p.rows; row += kRows) linear_rows_of<V, kRows>(p, row, begin, end);
  if constexpr (kRows > 1) linear_rows_from<V, kRows - 1>(p, row, begin, end);
}

template <class V>
void linear_rows(const LinearRows& p, int64_t begin, int64_t end) {
  linear_rows_from < V, V::kWidth<8 ? V::kWidth : 8>(p, 0, begin, end);
}

}  // namespace
}  // namespace mha_ext::kernels
