// The one matrix product of all five attention products: C[m][n] (+)= sum_k A(m, k) * B[k][n].
// B and C are row-major with n along the lanes, padded to whole vectors in our own scratch; A is read one scalar at a
// time, so it may lie either way:
//   ByRow     A(m, k) = a[m * lda + k]     S^T = K Q^T, dP^T = V dO^T, dV = P^T dO, dK = dS^T Q
//   ByColumn  A(m, k) = a[k * lda + m]     O^T = V^T P^T, dQ^T = K^T dS^T
// Sums are made in pieces of kPartialSum terms, which then join C one by one: in float32 one chain of T additions would
// round off up to three times as much as the library's products do. Pieces of 64 are 3 to 4 % faster, but then
// gradients are less exact than PyTorch's; whole sums in registers (blocks of 4 rows) make forward 3 % faster and
// causal backward as much slower. Linear maps, whose chains are short beside the library's, take longer pieces. The
// register-blocked inner loop follows Goto & van de Geijn (2008), with the packing of A left out: a tile is small
// enough to be read from cache as it lies.
#pragma once

#include "simd.inl.h"

namespace mha_ext::kernels {
namespace {

enum class Lhs { ByRow, ByColumn };
enum class Start { Zero, Add, Scale };  // what C holds before: nothing, a sum to add to, a sum to scale lane-wise first

constexpr int64_t kPartialSum = 32;

// Of a sum, how many numbers one operand holds.
template <typename Term>
constexpr int64_t kNumbersIn = 1;
template <>
constexpr int64_t kNumbersIn<BFloat16Pair> = 2;

template <int64_t kTerms = kPartialSum>
MHA_EXT_INLINE int64_t partial_sum_end(int64_t k) {
  return (k / kTerms + 1) * kTerms;
}

// Leading dimensions, depth and begin are counted in Terms.
template <typename Scalar, typename Term = Scalar>
struct GemmOperands {
  const Term* a;
  int64_t lda;
  const Term* b;
  int64_t ldb;
  Scalar* c;
  int64_t ldc;
  int64_t depth;                   // k; may be zero
  const Scalar* factor = nullptr;  // Start::Scale: one factor a lane
  int64_t begin = 0;               // the first k
  Scalar times = 1;                // of pairs, and Start::Zero: what every sum is multiplied with
};

template <class V, Lhs kLhs, Start kStart, int64_t kTerms, int R, int kCols, typename Term>
MHA_EXT_INLINE void gemm_block(const GemmOperands<typename V::Scalar, Term>& g, int64_t row, int64_t col) {
  using Vec = typename V::Vec;
  using Scalar = typename V::Scalar;
  constexpr bool kScalars = kNumbersIn<Term> == 1;
  Scalar* c = g.c + row * g.ldc + col;
  int64_t k = g.begin;
  const Term* b = g.b + col + k * g.ldb;
  const Term* a = kLhs == Lhs::ByRow ? g.a + row * g.lda + k : g.a + row + k * g.lda;
  do {
    const int64_t end = min_of(partial_sum_end<kTerms>(k), g.depth);
    const bool first = k == g.begin;
    Vec acc[R][kCols];
#pragma GCC unroll 16
    for (int r = 0; r < R; ++r) {
#pragma GCC unroll 4
      for (int j = 0; j < kCols; ++j) acc[r][j] = V::zero();
    }
    for (; k < end; ++k) {
      decltype(V::load(b)) rhs[kCols];
#pragma GCC unroll 4
      for (int j = 0; j < kCols; ++j) rhs[j] = V::load(b + j * V::kWidth);
#pragma GCC unroll 16
      for (int r = 0; r < R; ++r) {
        const auto lhs = V::broadcast(kLhs == Lhs::ByRow ? a[r * g.lda] : a[r]);
#pragma GCC unroll 4
        for (int j = 0; j < kCols; ++j) acc[r][j] = V::add_product(acc[r][j], lhs, rhs[j]);
      }
      b += g.ldb;
      a += kLhs == Lhs::ByRow ? 1 : g.lda;
    }
#pragma GCC unroll 16
    for (int r = 0; r < R; ++r) {
#pragma GCC unroll 4
      for (int j = 0; j < kCols; ++j) {
        Scalar* sum = c + r * g.ldc + j * V::kWidth;
        if (kStart == Start::Scale && first) {
          acc[r][j] += V::load(sum) * V::load(g.factor + col + j * V::kWidth);
        } else if (kStart != Start::Zero || !first) {
          acc[r][j] += V::load(sum);
        }
        // Last of all: fused with an addition in some blocks and not in others, it would round differently.
        if constexpr (!kScalars) acc[r][j] = k < g.depth ? acc[r][j] : acc[r][j] * g.times;
        V::store(sum, acc[r][j]);
      }
    }
  } while (k < g.depth);
}

// Rows [0, rows) of kCols vectors of columns, kRows at a time and the last ones by halves.
template <class V, Lhs kLhs, Start kStart, int64_t kTerms, int kRows, int kCols, typename Term>
__attribute__((noinline)) void gemm_panel(const GemmOperands<typename V::Scalar, Term>& g, int64_t rows, int64_t col) {
  int64_t row = 0;
  for (; row + kRows <= rows; row += kRows) gemm_block<V, kLhs, kStart, kTerms, kRows, kCols>(g, row, col);
  if constexpr (kRows > 4) {
    if (row + 4 <= rows) gemm_block<V, kLhs, kStart, kTerms, 4, kCols>(g, row, col), row += 4;
  }
  if constexpr (kLhs == Lhs::ByRow) {
    if (row + 2 <= rows) gemm_block<V, kLhs, kStart, kTerms, 2, kCols>(g, row, col), row += 2;
    if (row < rows) gemm_block<V, kLhs, kStart, kTerms, 1, kCols>(g, row, col);
  }
}

// rows: any number ByRow, else a multiple of V::kGemmRows; cols: a multiple of V::kWidth. Columns are cut into panels
// of at most kGemmCols vectors, as even as they come (4 vectors at most 3 wide run as 2 + 2).
// Pieces have kTerms terms.
template <class V, Lhs kLhs, Start kStart, int64_t kTerms = kPartialSum, typename Term = typename V::Scalar>
void gemm(const GemmOperands<typename V::Scalar, Term>& g, int64_t rows, int64_t cols) {
  static_assert(V::kGemmCols == 2 || V::kGemmCols == 3, "panels of one to three vectors");
  int64_t left = cols / V::kWidth;
  int64_t col = 0;
  while (left > 0) {
    const int64_t panels = (left + V::kGemmCols - 1) / V::kGemmCols;
    const int64_t width = (left + panels - 1) / panels;
    if (width == 1) {
      // Eight rows at a time, on every instruction set: fewer sums would wait for one another.
      gemm_panel<V, kLhs, kStart, kTerms, 8, 1>(g, rows, col);
    } else if (width == 2) {
      gemm_panel<V, kLhs, kStart, kTerms, V::kGemmRows, 2>(g, rows, col);
    } else {
      gemm_panel<V, kLhs, kStart, kTerms, V::kGemmRows, V::kGemmCols>(g, rows, col);
    }
    col += width * V::kWidth;
    left -= width;
  }
}

}  // namespace
}  // namespace mha_ext::kernels
