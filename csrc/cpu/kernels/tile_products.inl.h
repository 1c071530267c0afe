// Products of bfloat16 by tiles of 16 x 16 numbers, where an instruction makes them (V::kMultipliesTiles):
//   C[m][n] (+)= sum over pairs k of A[m][k] B[k][n]      A: rows of neighbours; B: rows of pairs, n along the lanes
// 2 x 2 tiles of C at a time take two tiles of A and two of B, which makes eight: all there are. An operand of a finer
// type comes as two numbers of bfloat16 (Split), whose products join the same sums.
#pragma once

#include "micro_gemm.inl.h"

namespace mha_ext::kernels {
namespace {

constexpr int64_t kTileRows = 16, kTilePairs = 16;  // of A, or of B in pairs; C has as many columns

enum class Split { None, Left, Right };  // which operand is the sum of two

struct TileOperands {
  const BFloat16Pair* a;
  int64_t lda;
  const BFloat16Pair* b;
  int64_t ldb;
  float* c;
  int64_t ldc;
  int64_t depth;                      // in pairs, whole tiles
  const BFloat16Pair* low = nullptr;  // what the split operand lacks; lies as it does
};

template <class V, int kRows, int kCols>
MHA_EXT_INLINE void load_left(const BFloat16Pair* a, int64_t lda) {
  V::template load_tile<4>(a, lda);
  if constexpr (kRows == 2) V::template load_tile<5>(a + kTileRows * lda, lda);
}

template <class V, int kRows, int kCols>
MHA_EXT_INLINE void load_right(const BFloat16Pair* b, int64_t ldb) {
  V::template load_tile<6>(b, ldb);
  if constexpr (kCols == 2) V::template load_tile<7>(b + kTilePairs, ldb);
}

template <class V, int kRows, int kCols>
MHA_EXT_INLINE void add_products_of_tiles() {
  V::template add_tile_product<0, 4, 6>();
  if constexpr (kCols == 2) V::template add_tile_product<1, 4, 7>();
  if constexpr (kRows == 2) V::template add_tile_product<2, 5, 6>();
  if constexpr (kRows == 2 && kCols == 2) V::template add_tile_product<3, 5, 7>();
}

template <int kRows, int kCols, class Each>
MHA_EXT_INLINE void for_each_sum(float* c, int64_t ldc, const Each& each) {
  each.template operator()<0>(c);
  if constexpr (kCols == 2) each.template operator()<1>(c + kTilePairs);
  if constexpr (kRows == 2) each.template operator()<2>(c + kTileRows * ldc);
  if constexpr (kRows == 2 && kCols == 2) each.template operator()<3>(c + kTileRows * ldc + kTilePairs);
}

template <class V, Split kSplit, Start kStart, int kRows, int kCols>
MHA_EXT_INLINE void tile_block(const TileOperands& g, int64_t row, int64_t col) {
  const BFloat16Pair *a = g.a + row * g.lda, *b = g.b + col;
  const BFloat16Pair* low = kSplit == Split::Left    ? g.low + row * g.lda
                            : kSplit == Split::Right ? g.low + col
                                                     : nullptr;
  float* c = g.c + row * g.ldc + col;
  for_each_sum<kRows, kCols>(c, g.ldc, [&]<int kTile>(const float* sum) {
    kStart == Start::Zero ? V::template zero_tile<kTile>() : V::template load_tile<kTile>(sum, g.ldc);
  });
  for (int64_t k = 0; k < g.depth; k += kTilePairs) {
    load_left<V, kRows, kCols>(a + k, g.lda);
    load_right<V, kRows, kCols>(b + k * g.ldb, g.ldb);
    add_products_of_tiles<V, kRows, kCols>();
    if constexpr (kSplit == Split::Left) load_left<V, kRows, kCols>(low + k, g.lda);
    if constexpr (kSplit == Split::Right) load_right<V, kRows, kCols>(low + k * g.ldb, g.ldb);
    if constexpr (kSplit != Split::None) add_products_of_tiles<V, kRows, kCols>();
  }
  for_each_sum<kRows, kCols>(c, g.ldc, [&]<int kTile>(float* sum) { V::template store_tile<kTile>(sum, g.ldc); });
}

// rows and cols are whole tiles.
template <class V, Split kSplit, Start kStart>
void tile_product(const TileOperands& g, int64_t rows, int64_t cols) {
  static_assert(kStart != Start::Scale, "sums are scaled before");
  for (int64_t row = 0; row < rows; row += 2 * kTileRows) {
    for (int64_t col = 0; col < cols; col += 2 * kTilePairs) {
      const bool two_rows = row + kTileRows < rows, two_cols = col + kTilePairs < cols;
      if (two_rows && two_cols) {
        tile_block<V, kSplit, kStart, 2, 2>(g, row, col);
      } else if (two_rows) {
        tile_block<V, kSplit, kStart, 2, 1>(g, row, col);
      } else if (two_cols) {
        tile_block<V, kSplit, kStart, 1, 2>(g, row, col);
      } else {
        tile_block<V, kSplit, kStart, 1, 1>(g, row, col);
      }
    }
  }
}

}  // namespace
}  // namespace mha_ext::kernels
