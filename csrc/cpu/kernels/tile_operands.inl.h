// What products by tiles are made of: pairs of neighbouring rows, and float numbers as two of bfloat16.
//
// P and dS rounded to bfloat16 would make the errors 1.4 times those of PyTorch's math path. As the sum of two bfloat16
// numbers they are exact to 2^-16 of themselves, a hundredth of what rounding the result takes, for twice the products.
// But where the second number is 0, an infinity in the other operand would meet 0 * infinity: numbers that
// are not finite are left out of the products, and their terms are added one by one.
#pragma once

#include "scores.inl.h"
#include "tile_products.inl.h"

namespace mha_ext::kernels {
namespace {

// Keys, or lanes, padded to what a sum by tiles takes them by.
MHA_EXT_INLINE int64_t whole_depth(int64_t count) { return round_up(count, 2 * kTilePairs); }

// What is known of numbers of float: weights of the forward pass have 16 bits (as_weight) and are finite or NaN, those
// of the backward pass are finite or NaN, gradients may be infinite as well.
enum class Known { SixteenBits, NotInfinite, Nothing };

// A number of float as the sum of two of bfloat16, each the upper half of its lane.
template <class V, Known kKnown>
struct HighLow {
  typename V::HashVec high, low;

  explicit MHA_EXT_INLINE HighLow(typename V::Vec x) {
    high = reinterpret_cast<typename V::HashVec>(x) & 0xffff0000u;
    typename V::Vec rest = x - reinterpret_cast<typename V::Vec>(high);
    if (kKnown == Known::Nothing) rest = V::select(rest != rest, V::zero(), rest);  // infinity - infinity
    low = reinterpret_cast<typename V::HashVec>(rest);
    if (kKnown != Known::SixteenBits) low += 0x8000u;
    low &= 0xffff0000u;  // bits are left where the rest is subnormal
  }
};

template <class V>
MHA_EXT_INLINE void store_pairs(BFloat16Pair* dst, typename V::HashVec first, typename V::HashVec second) {
  V::store(pointer_to<float>(static_cast<void*>(dst)), reinterpret_cast<typename V::Vec>((first >> 16) | second));
}

template <class V>
MHA_EXT_INLINE typename V::HashVec load_pairs(const BFloat16Pair* src) {
  return reinterpret_cast<typename V::HashVec>(V::load(pointer_to<float>(static_cast<const void*>(src))));
}

// A lane of zeros for each that is infinite or NaN.
template <class V>
MHA_EXT_INLINE typename V::Vec only_finite(typename V::Vec x) {
  return V::select(x - x == V::zero(), x, V::zero());
}

// Numbers of float as two of bfloat16, paired along their sum.
struct SplitRows {
  BFloat16Pair *high, *low;

  void take(Arena& arena, int64_t pairs) {
    high = arena.take<BFloat16Pair>(pairs);
    low = arena.take<BFloat16Pair>(pairs);
  }
};

// Rows, whose numbers number(row, col) gives a vector at a time, as pairs of neighbouring rows [padded / 2][width].
// Rows from `count` on are zero, and where kClears says so, what is not finite is too.
template <class V, bool kClears, class Number>
void pair_rows(int64_t count, int64_t padded, int64_t width, BFloat16Pair* dst, const Number& number) {
  const auto half = [&](int64_t row, int64_t c) {
    typename V::Vec x = V::zero();
    if (row < count) x = kClears ? only_finite<V>(number(row, c)) : number(row, c);
    return reinterpret_cast<typename V::HashVec>(x);
  };
  for (int64_t r = 0; r < padded; r += 2) {
    for (int64_t c = 0; c < width; c += V::kWidth) store_pairs<V>(dst + r / 2 * width + c, half(r, c), half(r + 1, c));
  }
}

// The same of rows of float that hold numbers of bfloat16.
template <class V>
void pair_rows(const float* rows, int64_t count, int64_t padded, int64_t width, BFloat16Pair* dst) {
  pair_rows<V, true>(count, padded, width, dst, [&](int64_t r, int64_t c) { return V::load(rows + r * width + c); });
}

// Rows of K or V, a tile of them at most, turned: [width][kBlockKeys / 2] pairs of keys. `pairs` is scratch of that
// size.
template <class V, bool kClears>
void turn_keys(Rows<BFloat16Pair> rows, int64_t count, int64_t width, BFloat16Pair* pairs, BFloat16Pair* columns) {
  const int64_t padded = whole_depth(count);
  pair_rows<V, kClears>(count, padded, width, pairs, [&](int64_t r, int64_t c) {
    return V::load(reinterpret_cast<const BFloat16*>(rows.data + r * rows.ld) + c);
  });
  transpose<V>(pointer_to<float>(static_cast<void*>(pairs)), width, padded / 2, width,
               pointer_to<float>(static_cast<void*>(columns)), kBlockKeys / 2);
}

// Whether rows of bfloat16 hold an infinity or NaN: a number whose exponent, all ones, carries when one is added.
template <class V>
bool any_nonfinite(Rows<BFloat16Pair> rows, int64_t count, int64_t terms) {
  typename V::HashVec carries{};
  for (int64_t r = 0; r < count; ++r) {
    for (int64_t c = 0; c < terms; c += V::kWidth) {
      carries |= (load_pairs<V>(rows.data + r * rows.ld + c) & 0x7f807f80u) + 0x00800080u;
    }
  }
  return V::any(V::lane_mask(carries & 0x80008000u));
}

// P^T or dS^T of a tile [key][lane] as pairs of keys; zero beyond its keys and its edge.
template <class V, Known kKnown>
void split_key_pairs(const Tile& t, const TileEdge& edge, const float* rows, const SplitRows& dst) {
  for (int64_t c = 0; c < t.lanes; c += V::kWidth) {
    const KeySpan seen = edge.keys_seen<V>(t, c);
    using Halves = HighLow<V, kKnown>;
    const auto split = [&](int64_t k) { return Halves(seen.holds(k) ? V::load(rows + k * t.lanes + c) : V::zero()); };
    for (int64_t k = 0; k < whole_depth(t.key_count); k += 2) {
      const Halves first = split(k), second = split(k + 1);
      store_pairs<V>(dst.high + k / 2 * t.lanes + c, first.high, second.high);
      store_pairs<V>(dst.low + k / 2 * t.lanes + c, first.low, second.low);
    }
  }
}

// P^T or dS^T of a tile as it lies, [key][lanes in pairs], in whole rows and columns of tiles; zero where there is no
// key or no query. Times `factor`.
template <class V, Known kKnown>
void split_lane_pairs(const Tile& t, const float* rows, float factor, const SplitRows& dst) {
  const int64_t width = whole_depth(t.lanes);
  auto *high = reinterpret_cast<uint16_t*>(dst.high), *low = reinterpret_cast<uint16_t*>(dst.low);
  for (int64_t k = 0; k < round_up(t.key_count, kTileRows); ++k, high += width, low += width) {
    for (int64_t c = 0; c < width; c += V::kWidth) {
      const int64_t queries = k < t.key_count ? t.queries.count - c : 0;
      typename V::Vec x = V::zero();
      if (queries > 0) x = V::load(rows + k * t.lanes + c) * factor;
      if (queries < V::kWidth) x = V::select(V::first_lanes(queries), x, V::zero());
      const HighLow<V, kKnown> split(x);
      V::store_halves(high + c, __builtin_convertvector(split.high >> 16, typename V::HalfVec));
      V::store_halves(low + c, __builtin_convertvector(split.low >> 16, typename V::HalfVec));
    }
  }
}

// The products of a tile, as in scores.inl.h. Sums over keys: O^T += V^T P^T and dQ^T += K^T dS^T.
template <class V>
void tile_key_sum(const Tile& t, const TileEdge& edge, const BFloat16Pair* columns, const SplitRows& pairs,
                  int64_t width, float* sum) {
  for_each_span<V>(t, edge, [&](int64_t lane, int64_t lanes, const KeySpan& keys) {
    const int64_t begin = keys.begin / (2 * kTilePairs) * kTilePairs, end = whole_depth(keys.end) / 2;
    const int64_t first = begin * t.lanes + lane;
    const TileOperands g{columns + begin, kBlockKeys / 2, pairs.high + first, t.lanes,
                         sum + lane,      t.lanes,        end - begin,        pairs.low + first};
    tile_product<V, Split::Right, Start::Add>(g, width, lanes);
  });
}

// Sums over lanes: dV += P^T dO and dK += dS^T Q; `right` are pairs of queries.
template <class V>
void tile_lane_sum(const Tile& t, const TileEdge& edge, const SplitRows& left, const BFloat16Pair* right, int64_t width,
                   float* sum) {
  const int64_t lda = whole_depth(t.lanes) / 2;
  for (int64_t k = 0; k < t.key_count; k += 2 * kTileRows) {
    const int64_t rows = min_of(2 * kTileRows, round_up(t.key_count - k, kTileRows));
    int64_t begin = lda, end = 0;
    for (int64_t c = 0; c < t.lanes; c += V::kWidth) {
      const KeySpan keys = edge.keys_seen<V>(t, c);
      if (keys.begin >= k + rows || keys.end <= k) continue;
      begin = min_of(begin, c / (2 * kTilePairs) * kTilePairs);
      end = whole_depth(c + V::kWidth) / 2;
    }
    if (begin >= end) continue;
    const int64_t first = k * lda + begin;
    const TileOperands g{left.high + first, lda,   right + begin * width, width,
                         sum + k * width,   width, end - begin,           left.low + first};
    tile_product<V, Split::Left, Start::Add>(g, rows, width);
  }
}

// Calls add(row, col, x) for each infinity or NaN x of a few rows; number(row, col) gives any of them.
template <class Number, class Add>
void for_each_nonfinite(int64_t rows, int64_t cols, const Number& number, const Add& add) {
  for (int64_t r = 0; r < rows; ++r) {
    for (int64_t c = 0; c < cols; ++c) {
      const float x = number(r, c);
      if (!__builtin_isfinite(x)) add(r, c, x);
    }
  }
}

MHA_EXT_INLINE float number_at(Rows<BFloat16Pair> rows, int64_t row, int64_t col) {
  return widen(reinterpret_cast<const BFloat16*>(rows.data + row * rows.ld)[col]);
}

}  // namespace
}  // namespace mha_ext::kernels
