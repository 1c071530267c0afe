// The two products of few queries over a tile, for the rows that see some of its keys.
#pragma once

#include "few_masks.inl.h"

namespace mha_ext::kernels {
namespace {

// What rows at[0 .. kOwn) of `own` give with some keys, from `products` on.
template <class V, int kOwn, typename Own, typename Element>
__attribute__((noinline)) void multiply_some(const Own* own, const RowVectors<V>& columns,
                                             const OtherRows<V, Element>& others, const int64_t* at,
                                             typename V::Scalar* products) {
  FewPointers<Own> rows;
  typename V::Scalar* results[kFewTogether];
#pragma GCC unroll 4
  for (int j = 0; j < kOwn; ++j) {
    rows[j] = own + at[j] * columns.padded();
    results[j] = products + at[j] * kFewKeys;
  }
  dot_products<V, kOwn>(rows, others, columns, results);
}

// products[r][k] = own[r] . others[k]: keys outside, rows inside, so that the keys come from the nearest cache for all
// rows.
template <class V, typename Own, typename Element>
void multiply_few(const Own* own, const RowVectors<V>& columns, const Rows<Element>& others, int64_t count,
                  typename V::Scalar* products, const FewMask<V>& mask, const ComingRows& coming = {}) {
  const int64_t* end = mask.active + mask.active_rows;
  for (int64_t k = 0; k < count; k += few_keys_together<V>()) {
    OtherRows<V, Element> some(others, k, count);
    some.coming = coming.data == nullptr ? nullptr : &coming;
    const int64_t* at = mask.active;
    for (; end - at >= 3 && end - at != 4; at += 3, some.coming = nullptr) {
      multiply_some<V, 3>(own, columns, some, at, products + k);
    }
    for (; end - at >= 2; at += 2, some.coming = nullptr) multiply_some<V, 2>(own, columns, some, at, products + k);
    if (at < end) multiply_some<V, 1>(own, columns, some, at, products + k);
  }
}

// weights[r][k] and rows [k]; `look`: hidden pairs are left out, not taken as 0.
template <class V, typename Element>
struct FewWeighted {
  const typename V::Scalar* weights;
  Rows<Element> rows;
  int64_t count;
  bool look;
  ComingRows coming;
};

template <class V, typename Element>
FewWeighted<V, Element> few_weighted(const typename V::Scalar* weights, const Rows<Element>& rows, int64_t count,
                                     bool look, const ComingRows& coming = {}) {
  return {weights, rows, count, look, coming};
}

template <class V, int kOwn, bool kLook, typename Element>
__attribute__((noinline)) void add_some_products(const FewWeighted<V, Element>& w, const RowVectors<V>& columns,
                                                 int64_t key, const int64_t* at, typename V::Scalar* sums,
                                                 const typename V::Scalar* addend, const ComingRows* coming) {
  FewPointers<typename V::Scalar> weights;
  typename V::Scalar* sum[kFewTogether];
#pragma GCC unroll 8
  for (int j = 0; j < kOwn; ++j) {
    weights[j] = w.weights + at[j] * kFewKeys + key;
    sum[j] = sums + at[j] * columns.padded();
  }
  const WeightedRows<V, Element> some{{w.rows.data + key * w.rows.ld, w.rows.ld},
                                      min_of(kFewStep, w.count - key),
                                      kLook ? addend + key : nullptr,
                                      1,
                                      coming,
                                      key};
  add_weighted<V, Sums::SideBySide, kOwn, kLook>(some, weights, columns, sum);
}

// As many of the `left` rows together as make their rounds even; returns how many.
template <class V, typename Element>
int64_t add_most_products(const FewWeighted<V, Element>& w, const RowVectors<V>& columns, int64_t key,
                          const int64_t* at, int64_t left, typename V::Scalar* sums, const ComingRows* coming) {
  const auto add = [&](auto run) { run(w, columns, key, at, sums, nullptr, coming); };
  if (left == 6 || left > 8) return add(add_some_products<V, 6, false, Element>), 6;
  if (left == 4 || left > 6) return add(add_some_products<V, 4, false, Element>), 4;
  if (left >= 3) return add(add_some_products<V, 3, false, Element>), 3;
  if (left == 2) return add(add_some_products<V, 2, false, Element>), 2;
  return add(add_some_products<V, 1, false, Element>), 1;
}

// sums[r] += sum_k weights[r][k] rows[k], a few keys at a time, which stay in the nearest cache for all rows.
template <class V, typename Element>
void add_few_products(const FewWeighted<V, Element>& w, const RowVectors<V>& columns, typename V::Scalar* sums,
                      const FewMask<V>& mask) {
  const int64_t* end = mask.active + mask.active_rows;
  for (int64_t k = 0; k < w.count; k += kFewStep) {
    const int64_t* at = mask.active;
    for (; w.look && at < end; ++at) {
      const auto* addend = mask.rows[*at].addend;
      addend != nullptr ? add_some_products<V, 1, true>(w, columns, k, at, sums, addend, nullptr)
                        : add_some_products<V, 1, false>(w, columns, k, at, sums, nullptr, nullptr);
    }
    const ComingRows* coming = w.coming.data == nullptr ? nullptr : &w.coming;
    for (; at < end; coming = nullptr) at += add_most_products<V>(w, columns, k, at, end - at, sums, coming);
  }
}

}  // namespace
}  // namespace mha_ext::kernels
