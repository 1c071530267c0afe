// Rows along the lanes, for few queries: products of one row with many, and sums of rows with weights.
#pragma once

#include "scores.inl.h"

namespace mha_ext::kernels {
namespace {

constexpr int64_t kFewKeys = 128;    // keys a tile
constexpr int64_t kFewRows = 64;     // rows that run together at most
constexpr int64_t kFewStep = 32;     // keys that are added up at a time
constexpr int64_t kFewWidened = 16;  // rows that run together while half types are widened for each of their rounds

// How vectors cover a row: side by side, and one more up to the row's end where it is no whole number of vectors. That
// one overlaps its neighbour, so that nothing behind the row is read. Rows shorter than a vector are padded copies.
template <class V>
struct RowVectors {
  int64_t whole, tail;       // vectors side by side; where one more begins, 0 when there is none
  typename V::IntVec fresh;  // lanes of that one which no other vector holds

  explicit RowVectors(int64_t width) {
    const int64_t rest = width < V::kWidth ? 0 : width % V::kWidth;
    whole = width < V::kWidth ? 1 : width / V::kWidth;
    tail = rest == 0 ? 0 : width - V::kWidth;
    for (int i = 0; i < V::kWidth; ++i) fresh[i] = i >= V::kWidth - rest ? -1 : 0;
  }
  int64_t slots() const { return whole + (tail != 0); }
  int64_t offset(int64_t slot) const { return slot < whole ? slot * V::kWidth : tail; }
  int64_t padded() const { return slots() * V::kWidth; }
};

// Rows of K or V, in place wherever vectors can read them. Rows far apart are copied when they are read again (see
// key_rows).
template <class V>
Rows<typename V::Scalar> few_rows(const TensorView& t, const QueryBlock& rows, int64_t cols, bool again,
                                  typename V::Scalar* scratch) {
  using Scalar = typename V::Scalar;
  const bool near = t.stride_t >= 0 && t.stride_t <= 2 * cols;
  if (t.type == kTypeOf<Scalar> && t.stride_d == 1 && cols >= V::kWidth && (near || !again)) {
    return {
        static_cast<const Scalar*>(t.data) + rows.batch * t.stride_b + rows.head * t.stride_h + rows.begin * t.stride_t,
        t.stride_t};
  }
  const int64_t ld = round_up(cols, V::kWidth);
  read_rows<V>(t, rows, rows.count, cols, Scalar(1), scratch, ld);
  return {scratch, ld};
}

// use(rows) for rows of K or V that vectors read in place, also those of half types, widened on their way; else for a
// copy. With many rows of our own, which read them several times over, half types are copied.
template <class V, class Use>
void with_few_rows(const TensorView& t, const QueryBlock& rows, int64_t cols, int64_t own_rows,
                   typename V::Scalar* scratch, const Use& use) {
  if constexpr (sizeof(typename V::Scalar) == sizeof(float)) {
    if (t.stride_d == 1 && cols >= V::kWidth && own_rows <= kFewWidened) {
      const int64_t first = rows.batch * t.stride_b + rows.head * t.stride_h + rows.begin * t.stride_t;
      if (t.type == ElementType::BFloat16) {
        return use(Rows<BFloat16>{pointer_to<BFloat16>(t.data) + first, t.stride_t});
      }
      if (t.type == ElementType::Float16) return use(Rows<Float16>{pointer_to<Float16>(t.data) + first, t.stride_t});
    }
  }
  use(few_rows<V>(t, rows, cols, own_rows > 1, scratch));
}

// Rows of our own that run together share each vector of K or V that is read.
constexpr int kFewTogether = 6;

template <typename Number>
using FewPointers = const Number* [kFewTogether];

// Keys whose products with a row are formed at a time: whole vectors of results.
template <class V>
constexpr int few_keys_together() {
  return V::kWidth < 8 ? 8 : V::kWidth;
}

// Rows of a tile that is read next: V while K is multiplied, the next K while V is added up. Rows that are read a few
// numbers at a time are no stream that a processor fetches ahead by itself. Eight rows at a time: about a page at once
// was measured best (AMD Zen 4, one core, 128 floats a row: 15 GB/s without, 27 of 30 with; twice as much at once: 17).
struct ComingRows {
  const char* data = nullptr;
  int64_t stride = 0, length = 0;  // bytes

  ComingRows() = default;
  ComingRows(const TensorView& t, const QueryBlock& rows, int64_t cols) {
    const int64_t size = t.type == ElementType::Float64 ? 8 : t.type == ElementType::Float32 ? 4 : 2;
    if (t.stride_d != 1) return;
    data = static_cast<const char*>(t.data) +
           (rows.batch * t.stride_b + rows.head * t.stride_h + rows.begin * t.stride_t) * size;
    stride = t.stride_t * size, length = cols * size;
  }

  MHA_EXT_INLINE void fetch(int64_t first, int64_t count) const {
    const char* row = data + first * stride;
    for (int64_t r = 0; r < count; ++r, row += stride) {
      for (int64_t i = 0; i < length; i += 64) __builtin_prefetch(row + i, 0, 2);
    }
  }
};

constexpr int64_t kFewFetched = 8;

// Where so many rows begin; those from `count` on are the last one again.
template <class V, typename Element>
struct OtherRows {
  const Element* row[few_keys_together<V>()];
  const ComingRows* coming = nullptr;  // as many rows from `first` on are fetched, unless null
  int64_t first;
  OtherRows(const Rows<Element>& rows, int64_t first, int64_t count) : first(first) {
    for (int i = 0; i < few_keys_together<V>(); ++i) row[i] = rows.data + min_of(first + i, count - 1) * rows.ld;
  }
};

// sums[0 .. kCount) -> their lanes added up: kCount results side by side, V::kWidth / kCount times as partial sums. The
// rounds are those of `transpose`, added instead of kept.
template <class V, int kCount>
MHA_EXT_INLINE typename V::Vec add_lanes(const typename V::Vec* sums) {
  if constexpr (kCount == 1) {
    return sums[0];
  } else {
    typename V::Vec halves[kCount / 2];
#pragma GCC unroll 8
    for (int i = 0; i < kCount / 2; ++i) {
      halves[i] = V::interleave_low(sums[i], sums[i + kCount / 2]) + V::interleave_high(sums[i], sums[i + kCount / 2]);
    }
    return add_lanes<V, kCount / 2>(halves);
  }
}

// Products of kOwn rows with kRows others, every kStep-th from kFirst on: vectors of kRows partial sums a row, or whole
// results where a vector is no longer than kRows.
template <class V, int kOwn, int kRows, int kFirst, int kStep, typename Own, typename Element>
MHA_EXT_INLINE void multiply_rows(const FewPointers<Own>& own, const OtherRows<V, Element>& others,
                                  const RowVectors<V>& columns, typename V::Vec* results) {
  using Vec = typename V::Vec;
  Vec sum[kOwn][kRows];
#pragma GCC unroll 8
  for (int j = 0; j < kOwn; ++j) {
#pragma GCC unroll 16
    for (int i = 0; i < kRows; ++i) sum[j][i] = V::zero();
  }
  if (others.coming != nullptr) others.coming->fetch(others.first + (kStep == 1 ? kFirst : kFirst * kRows), kRows);
  const int64_t end = columns.whole * V::kWidth;
  int64_t c = 0;
  do {
    decltype(V::load(own[0])) x[kOwn];
#pragma GCC unroll 8
    for (int j = 0; j < kOwn; ++j) x[j] = V::load(own[j] + c);
#pragma GCC unroll 16
    for (int i = 0; i < kRows; ++i) {
      const auto y = V::load(others.row[kFirst + kStep * i] + c);
#pragma GCC unroll 4
      for (int j = 0; j < kOwn; ++j) sum[j][i] = V::add_product(sum[j][i], x[j], y);
    }
    c += V::kWidth;
  } while (c < end);
  if constexpr (kNumbersIn<Own> == 1) {  // pairs have no tail
    for (int i = 0; i < kRows && columns.tail != 0; ++i) {
      const Vec y = V::select(columns.fresh, V::load(others.row[kFirst + kStep * i] + columns.tail), V::zero());
#pragma GCC unroll 4
      for (int j = 0; j < kOwn; ++j) {
        sum[j][i] += V::select(columns.fresh, V::load(own[j] + columns.tail), V::zero()) * y;
      }
    }
  }
  constexpr int kTogether = kRows < V::kWidth ? kRows : V::kWidth;
#pragma GCC unroll 8
  for (int j = 0; j < kOwn; ++j) {
#pragma GCC unroll 4
    for (int i = 0; i < kRows / kTogether; ++i) {
      results[j * (kRows / kTogether) + i] = add_lanes<V, kTogether>(&sum[j][i * kTogether]);
    }
  }
}

// products[j][k] = own[j] . others.row[k].
template <class V, int kOwn, typename Own, typename Element>
MHA_EXT_INLINE void dot_products(const FewPointers<Own>& own, const OtherRows<V, Element>& others,
                                 const RowVectors<V>& columns, typename V::Scalar* const* products) {
  constexpr int W = V::kWidth;
  constexpr int kRows = kOwn == 1 ? 8 : V::kGemmRows;  // sums in flight that hide an addition's latency, in registers
  if constexpr (kRows < W) {
    static_assert(kRows * 2 == W, "two halves");
    typename V::Vec even[kOwn], odd[kOwn];
    multiply_rows<V, kOwn, kRows, 0, 2>(own, others, columns, even);
    multiply_rows<V, kOwn, kRows, 1, 2>(own, others, columns, odd);
#pragma GCC unroll 8
    for (int j = 0; j < kOwn; ++j) {
      V::store(products[j], V::interleave_low(even[j], odd[j]) + V::interleave_high(even[j], odd[j]));
    }
  } else {
    constexpr int kVectors = kRows / W;
    typename V::Vec results[kOwn * kVectors];
    multiply_rows<V, kOwn, kRows, 0, 1>(own, others, columns, results);
#pragma GCC unroll 8
    for (int j = 0; j < kOwn * kVectors; ++j) V::store(products[j / kVectors] + j % kVectors * W, results[j]);
    if constexpr (kRows < few_keys_together<V>()) {
      static_assert(kRows * 2 == few_keys_together<V>(), "two halves");
      multiply_rows<V, kOwn, kRows, kRows, 1>(own, others, columns, results);
#pragma GCC unroll 4
      for (int j = 0; j < kOwn * kVectors; ++j) V::store(products[j / kVectors] + kRows + j % kVectors * W, results[j]);
    }
  }
}

// Rows, and where weights of sums over them lie, `step` apart. With `addend` set, which lies as a weight does, rows
// whose addend is minus infinity are left out.
template <class V, typename Element = typename V::Scalar>
struct WeightedRows {
  Rows<Element> rows;
  int64_t count;
  const typename V::Scalar* addend;
  int64_t step;
  const ComingRows* coming = nullptr;  // as many rows from `first` on are fetched, unless null
  int64_t first = 0;
};

// Sums may begin afresh, and lie as rows do then; else they are added to, their vectors side by side.
enum class Sums { Fresh, SideBySide };

template <class V, int kOwn, int kVectors, bool kLook, typename Element>
MHA_EXT_INLINE void add_one_row(const WeightedRows<V, Element>& w, const FewPointers<typename V::Scalar>& weights,
                                const Element* const* row, int64_t k, typename V::Vec (&sum)[kOwn][kVectors]) {
  if (kLook && w.addend[k * w.step] == -V::kInfinity) return;
  typename V::Vec weight[kOwn];
#pragma GCC unroll 8
  for (int j = 0; j < kOwn; ++j) weight[j] = V::broadcast(weights[j][k * w.step]);
#pragma GCC unroll 8
  for (int v = 0; v < kVectors; ++v) {
    const typename V::Vec x = V::load(row[v] + k * w.rows.ld);
#pragma GCC unroll 8
    for (int j = 0; j < kOwn; ++j) sum[j][v] += weight[j] * x;
  }
}

// A piece of a sum begins at 0 and then joins the others: what a row gets does not depend on the rows beside it.
template <class V, Sums kSums, int kOwn, int kVectors, bool kLook, typename Element>
MHA_EXT_INLINE void add_weighted_slots(const WeightedRows<V, Element>& w,
                                       const FewPointers<typename V::Scalar>& weights, const RowVectors<V>& columns,
                                       int64_t slot, typename V::Scalar* const* sums) {
  typename V::Vec sum[kOwn][kVectors];
  const Element* row[kVectors];
#pragma GCC unroll 8
  for (int v = 0; v < kVectors; ++v) row[v] = w.rows.data + columns.offset(slot + v);
#pragma GCC unroll 8
  for (int j = 0; j < kOwn; ++j) {
#pragma GCC unroll 8
    for (int v = 0; v < kVectors; ++v) sum[j][v] = V::zero();
  }
  for (int64_t k = 0; k < w.count; ++k) {
    if (w.coming != nullptr && slot == 0 && k % kFewFetched == 0) w.coming->fetch(w.first + k, kFewFetched);
    add_one_row<V, kOwn, kVectors, kLook>(w, weights, row, k, sum);
  }
#pragma GCC unroll 8
  for (int j = 0; j < kOwn; ++j) {
#pragma GCC unroll 8
    for (int v = 0; v < kVectors; ++v) {
      const int64_t at = kSums == Sums::Fresh ? columns.offset(slot + v) : (slot + v) * V::kWidth;
      if constexpr (kSums == Sums::SideBySide) sum[j][v] += V::load(sums[j] + at);
      V::store(sums[j] + at, sum[j][v]);
    }
  }
}

// sums[j] (+)= weights[j][k] row[k] over k.
template <class V, Sums kSums, int kOwn, bool kLook, typename Element>
MHA_EXT_INLINE void add_weighted(const WeightedRows<V, Element>& w, const FewPointers<typename V::Scalar>& weights,
                                 const RowVectors<V>& columns, typename V::Scalar* const* sums) {
  constexpr bool kManyRegisters = V::kGemmRows == 8;
  int64_t slot = 0;
  if constexpr (kOwn == 1 || (kManyRegisters && kOwn <= 3)) {  // whole rows of 128 floats: once through them
    for (; slot + 8 <= columns.slots(); slot += 8) {
      add_weighted_slots<V, kSums, kOwn, 8, kLook>(w, weights, columns, slot, sums);
    }
  }
  if constexpr (kManyRegisters || kOwn == 1) {
    for (; slot + 4 <= columns.slots(); slot += 4) {
      add_weighted_slots<V, kSums, kOwn, 4, kLook>(w, weights, columns, slot, sums);
    }
  }
  for (; slot + 2 <= columns.slots(); slot += 2) {
    add_weighted_slots<V, kSums, kOwn, 2, kLook>(w, weights, columns, slot, sums);
  }
  if (slot < columns.slots()) add_weighted_slots<V, kSums, kOwn, 1, kLook>(w, weights, columns, slot, sums);
}

// Whether rows hold an infinity or NaN (any_nonfinite, in place).
template <class V, typename Element>
bool few_nonfinite(Rows<Element> rows, int64_t count, const RowVectors<V>& columns) {
  typename V::Vec sum = V::zero();
  for (int64_t r = 0; r < count; ++r) {
    for (int64_t slot = 0; slot < columns.slots(); ++slot) {
      sum += V::load(rows.data + r * rows.ld + columns.offset(slot)) * typename V::Scalar(0);
    }
  }
  return V::any(sum != sum);
}

}  // namespace
}  // namespace mha_ext::kernels
