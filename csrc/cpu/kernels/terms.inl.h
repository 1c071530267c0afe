// Operands of the products of two tensors, Q K^T and dO V^T: numbers of the compute type or, where an instruction
// multiplies bfloat16 (V::Term), pairs of neighbours as they are. Such products are exact in float32. The others, with
// P or dS, are of the compute type: rounding those to bfloat16 makes them twice as fast, and the gradients' error 1.4
// times that of PyTorch's math path.
#pragma once

#include "micro_gemm.inl.h"
#include "rows.inl.h"
#include "tile_products.inl.h"

namespace mha_ext::kernels {
namespace {

template <typename Term>
struct Rows {
  const Term* data;
  int64_t ld;
};

// Widths of scratch rows: whole vectors, and whole blocks of the product's rows.
template <class V>
int64_t padded_width(int64_t n) {
  constexpr int64_t step = V::kWidth > V::kGemmRows ? V::kWidth : V::kGemmRows;
  static_assert(step % V::kWidth == 0 && step % V::kGemmRows == 0, "one must divide the other");
  return round_up(n, step);
}

// Terms that hold so many numbers.
template <typename Term>
MHA_EXT_INLINE int64_t terms_in(int64_t numbers) {
  return (numbers + kNumbersIn<Term> - 1) / kNumbersIn<Term>;
}

// Rows further apart than twice their length are copied: in place, strides of a power of two compete for few cache
// sets. Prefetching V's rows, the next tile's keys and the next head's first rows was tried: within noise at T = 64 ...
// 2048.
MHA_EXT_INLINE bool lie_close(const TensorView& t, int64_t cols) {
  return t.stride_t >= cols && t.stride_t <= 2 * cols;
}

// Rows of K or V for a product: read in place when they already lie as a scratch copy would, else copied.
template <class V>
Rows<typename V::Scalar> key_rows(const TensorView& t, const QueryBlock& rows, int64_t cols,
                                  typename V::Scalar* scratch) {
  const int64_t ld = padded_width<V>(cols);
  if (lie_close(t, cols)) {
    if (const auto* data = rows_in_place<V>(t, rows, rows.count, cols, ld)) return {data, t.stride_t};
  }
  read_rows<V>(t, rows, rows.count, cols, typename V::Scalar(1), scratch, ld);
  return {scratch, ld};
}

MHA_EXT_INLINE const uint16_t* first_half(const TensorView& t, const QueryBlock& block) {
  return static_cast<const uint16_t*>(t.data) + block.batch * t.stride_b + block.head * t.stride_h +
         block.begin * t.stride_t;
}

// Rows block.begin ... of a bfloat16 tensor as [rows_padded][ld] pairs; padding rows and columns are zero.
inline void read_pairs(const TensorView& t, const QueryBlock& block, int64_t rows_padded, int64_t cols,
                       BFloat16Pair* dst, int64_t ld) {
  const uint16_t* src = first_half(t, block);
  auto* halves = reinterpret_cast<uint16_t*>(dst);
  for (int64_t r = 0; r < block.count; ++r, src += t.stride_t, halves += 2 * ld) {
    if (t.stride_d == 1) {
      __builtin_memcpy(halves, src, static_cast<size_t>(cols) * sizeof(*src));
    } else {
      for (int64_t c = 0; c < cols; ++c) halves[c] = src[c * t.stride_d];
    }
    __builtin_memset(halves + cols, 0, static_cast<size_t>(2 * ld - cols) * sizeof(*halves));
  }
  __builtin_memset(halves, 0, static_cast<size_t>((rows_padded - block.count) * ld) * sizeof(BFloat16Pair));
}

// key_rows, of pairs. Tiles are read whole: rows that do not fill theirs are copied.
template <class V>
Rows<BFloat16Pair> key_rows(const TensorView& t, const QueryBlock& rows, int64_t cols, BFloat16Pair* scratch) {
  constexpr int64_t kCols = V::kMultipliesTiles ? 2 * kTilePairs : 2, kRows = V::kMultipliesTiles ? kTileRows : 1;
  if (lie_close(t, cols) && t.stride_d == 1 && cols % kCols == 0 && rows.count % kRows == 0 && t.stride_t % 2 == 0) {
    return {reinterpret_cast<const BFloat16Pair*>(first_half(t, rows)), t.stride_t / 2};
  }
  const int64_t ld = padded_width<V>(terms_in<BFloat16Pair>(cols));
  read_pairs(t, rows, round_up(rows.count, kRows), cols, scratch, ld);
  return {scratch, ld};
}

// Rows of a tensor turned into columns of pairs [D / 2][rows_padded]; `rows` is scratch for a copy of them. A pair is
// moved as a number of its size.
template <class V>
void read_pair_columns(const TensorView& t, const QueryBlock& block, int64_t rows_padded, int64_t cols,
                       typename V::Scalar* rows, BFloat16Pair* dst) {
  static_assert(sizeof(typename V::Scalar) == sizeof(BFloat16Pair), "the same size");
  const int64_t ld = padded_width<V>(terms_in<BFloat16Pair>(cols));
  read_pairs(t, block, rows_padded, cols, static_cast<BFloat16Pair*>(static_cast<void*>(rows)), ld);
  transpose<V>(rows, ld, rows_padded, ld, pointer_to<typename V::Scalar>(static_cast<void*>(dst)), rows_padded);
}

// Whether rows, which padding makes whole vectors, hold an infinity or NaN: x * 0 is 0 for every finite x and NaN
// otherwise.
template <class V>
bool any_nonfinite(Rows<typename V::Scalar> rows, int64_t count, int64_t cols) {
  typename V::Vec sums[2] = {V::zero(), V::zero()};
  for (int64_t r = 0; r < count; ++r) {
    const auto* row = rows.data + r * rows.ld;
    int64_t c = 0;
    for (; c + V::kWidth < cols; c += 2 * V::kWidth) {
      sums[0] += V::load(row + c) * typename V::Scalar(0);
      sums[1] += V::load(row + c + V::kWidth) * typename V::Scalar(0);
    }
    if (c < cols) sums[0] += V::load(row + c) * typename V::Scalar(0);
  }
  const typename V::Vec sum = sums[0] + sums[1];
  return V::any(sum != sum);
}

}  // namespace
}  // namespace mha_ext::kernels
