// The linear map of a few rows. There is nothing to gain from tiles: each weight is read once from memory, as it lies,
// and lanes run along the sum. As many sums as there are lanes are kept at once, so that adding up their lanes takes
// two shuffles a sum.
#pragma once

#include "linear_rows.h"
#include "terms.inl.h"

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
template <typename Element>
constexpr bool kIsBFloat16 = false;
template <>
constexpr bool kIsBFloat16<BFloat16> = true;

// A vector of the sums' terms: numbers of an element type, widened, or pairs of bfloat16 where those are multiplied.
template <class V, typename Element>
MHA_EXT_INLINE auto load_terms(const Element* p) {
  if constexpr (V::kMultipliesPairs && kIsBFloat16<Element>) {
    return V::load(static_cast<const BFloat16Pair*>(static_cast<const void*>(p)));
  } else {
    return V::load(p);
  }
}

template <class V, typename Element, int kRows>
MHA_EXT_INLINE void linear_rows_block(const LinearRows& p, int64_t row, int64_t begin, int64_t count) {
  using Scalar = typename V::Scalar;
  constexpr int kOutputs = V::kWidth / kRows;
  const Element* weights[kOutputs];
  for (int i = 0; i < kOutputs; ++i) {
    weights[i] = static_cast<const Element*>(p.weight) + (begin + min_of(i, count - 1)) * p.weight_stride;
  }
  const Element* input = static_cast<const Element*>(p.input) + row * p.input_stride;
  using Terms = decltype(load_terms<V>(input));
  constexpr int64_t kStep = V::kMultipliesPairs && kIsBFloat16<Element> ? 2 * V::kWidth : V::kWidth;
  const int64_t whole = p.depth / kStep * kStep, stride = p.input_stride;
  typename V::Vec sums[V::kWidth];
#pragma GCC unroll 16
  for (int i = 0; i < V::kWidth; ++i) sums[i] = V::zero();
  for (int64_t k = 0; k < whole; k += kStep) {
    Terms lanes[kRows];
#pragma GCC unroll 8
    for (int m = 0; m < kRows; ++m) lanes[m] = load_terms<V>(input + m * stride + k);
#pragma GCC unroll 16
    for (int i = 0; i < kOutputs; ++i) {
      const Terms weight = load_terms<V>(weights[i] + k);
#pragma GCC unroll 8
      for (int m = 0; m < kRows; ++m) sums[i * kRows + m] = V::add_product(sums[i * kRows + m], weight, lanes[m]);
    }
  }
  Scalar result[V::kWidth];
  V::store(result, add_lanes<V>(sums));
  for (int m = 0; m < kRows; ++m) {
    Element* out = static_cast<Element*>(p.out) + (row + m) * p.out_stride + begin;
    for (int64_t i = 0; i < count; ++i) {
      Scalar sum = p.bias == nullptr ? Scalar(0) : widen(static_cast<const Element*>(p.bias)[begin + i]);
      for (int64_t k = whole; k < p.depth; ++k) sum += widen(weights[i][k]) * widen(input[m * stride + k]);
      narrow(sum + result[i * kRows + m], out[i]);
    }
  }
}

template <class V, typename Element, int kRows>
__attribute__((noinline)) void linear_rows_of(const LinearRows& p, int64_t row, int64_t begin, int64_t end) {
  constexpr int64_t kOutputs = V::kWidth / kRows;
  for (; begin < end; begin += kOutputs)
    linear_rows_block<V, Element, kRows>(p, row, begin, min_of(kOutputs, end - begin));
}

// Rows from `row` on, as many at a time as there are up to kRows.
template <class V, typename Element, int kRows>
void linear_rows_from(const LinearRows& p, int64_t row, int64_t begin, int64_t end) {
  for (; row + kRows <= p.rows; row += kRows) linear_rows_of<V, Element, kRows>(p, row, begin, end);
  if constexpr (kRows > 1) linear_rows_from<V, Element, kRows - 1>(p, row, begin, end);
}

template <class V>
void linear_rows(const LinearRows& p, int64_t begin, int64_t end) {
  constexpr int kMostRows = V::kWidth < 8 ? V::kWidth : 8;
  if constexpr (sizeof(typename V::Scalar) == sizeof(double)) {
    linear_rows_from<V, double, kMostRows>(p, 0, begin, end);
  } else if (p.type == ElementType::BFloat16) {
    linear_rows_from<V, BFloat16, kMostRows>(p, 0, begin, end);
  } else if (p.type == ElementType::Float16) {
    linear_rows_from<V, Float16, kMostRows>(p, 0, begin, end);
  } else {
    linear_rows_from<V, float, kMostRows>(p, 0, begin, end);
  }
}

}  // namespace
}  // namespace mha_ext::kernels
