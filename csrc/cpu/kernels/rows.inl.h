// Moving rows between tensors (any element type, any strides) and scratch (compute type, padded with zeros), and
// turning a scratch block of rows into one of columns.
#pragma once

#include "params.h"
#include "simd.inl.h"

namespace mha_ext::kernels {
namespace {

template <typename Scalar>
MHA_EXT_INLINE const Scalar* pointer_to(const void* data) {
  return static_cast<const Scalar*>(data);
}
template <typename Scalar>
MHA_EXT_INLINE Scalar* pointer_to(void* data) {
  return static_cast<Scalar*>(data);
}

// The element type of tensors that hold the compute type.
template <typename Scalar>
constexpr ElementType kTypeOf = sizeof(Scalar) == 4 ? ElementType::Float32 : ElementType::Float64;

template <typename To, typename From>
MHA_EXT_INLINE To bits_as(From from) {
  static_assert(sizeof(To) == sizeof(From), "same size");
  To to;
  __builtin_memcpy(&to, &from, sizeof(to));
  return to;
}

MHA_EXT_INLINE double widen(double x) { return x; }
MHA_EXT_INLINE float widen(float x) { return x; }
MHA_EXT_INLINE float widen(BFloat16 x) { return bits_as<float>(static_cast<uint32_t>(x.bits) << 16); }

// Shifting the 10-bit mantissa into place leaves the exponent 112 too small; one multiplication mends it, for
// subnormals too. Infinity and NaN keep all exponent bits set.
MHA_EXT_INLINE float widen(Float16 x) {
  const uint32_t magnitude = (x.bits & 0x7fffu) << 13;
  const uint32_t finite = bits_as<uint32_t>(bits_as<float>(magnitude) * 0x1p112f);
  const uint32_t special = magnitude | 0x7f800000u;
  const uint32_t sign = (x.bits & 0x8000u) << 16;
  return bits_as<float>(sign | (magnitude >= (0x7c00u << 13) ? special : finite));
}

MHA_EXT_INLINE void narrow(double x, double& y) { y = x; }
MHA_EXT_INLINE void narrow(float x, float& y) { y = x; }

// Round to nearest even; a NaN stays one.
MHA_EXT_INLINE void narrow(float x, BFloat16& y) {
  const uint32_t bits = bits_as<uint32_t>(x);
  const uint32_t rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
  const bool is_nan = (bits & 0x7fffffffu) > 0x7f800000u;
  y.bits = static_cast<uint16_t>(is_nan ? 0x7fc0u : rounded);
}

// Round to nearest even. Below 2^-14 the sum with 0.5 rounds to a multiple of 2^-24, the spacing of half subnormals;
// from 65520 on the carry of the rounding runs into the exponent and gives infinity.
MHA_EXT_INLINE void narrow(float x, Float16& y) {
  const uint32_t bits = bits_as<uint32_t>(x);
  const uint32_t magnitude = bits & 0x7fffffffu;
  const uint32_t subnormal = bits_as<uint32_t>(bits_as<float>(magnitude) + 0.5f) - bits_as<uint32_t>(0.5f);
  const uint32_t normal = (magnitude - (112u << 23) + 0xfffu + ((magnitude >> 13) & 1u)) >> 13;
  const uint32_t special = magnitude > 0x7f800000u ? 0x7e00u : 0x7c00u;
  const uint32_t half = magnitude >= 0x47800000u ? special : magnitude < 0x38800000u ? subnormal : normal;
  y.bits = static_cast<uint16_t>(half | ((bits >> 16) & 0x8000u));
}

// The view without its first columns.
template <typename View>
MHA_EXT_INLINE View skip_columns(View view, int64_t columns) {
  const int64_t element = view.type == ElementType::Float64 ? 8 : view.type == ElementType::Float32 ? 4 : 2;
  const uintptr_t skipped = static_cast<uintptr_t>(columns * view.stride_d * element);
  view.data = reinterpret_cast<decltype(view.data)>(reinterpret_cast<uintptr_t>(view.data) + skipped);
  return view;
}

// dst[0 .. ld) = src[0 .. cols) * scale, then zeros.
template <class V, typename Element>
MHA_EXT_INLINE void read_row(const Element* src, int64_t stride, int64_t cols, typename V::Scalar scale,
                             typename V::Scalar* __restrict dst, int64_t ld) {
  int64_t c = 0;
  if (stride != 1) {
    for (; c < cols; ++c) dst[c] = widen(src[c * stride]) * scale;
  } else {
    for (; c + V::kWidth <= cols; c += V::kWidth) V::store(dst + c, V::load(src + c) * scale);
    for (; c < cols; ++c) dst[c] = widen(src[c]) * scale;
  }
  for (; c < ld; ++c) dst[c] = 0;
}

template <class V, typename Element>
void read_rows_of(const TensorView& t, const QueryBlock& block, int64_t cols, typename V::Scalar scale,
                  typename V::Scalar* dst, int64_t ld) {
  const Element* src = static_cast<const Element*>(t.data) + block.batch * t.stride_b + block.head * t.stride_h +
                       block.begin * t.stride_t;
  for (int64_t r = 0; r < block.count; ++r) {
    read_row<V>(src + r * t.stride_t, t.stride_d, cols, scale, dst + r * ld, ld);
  }
}

// Rows block.begin ... of head block.head as [rows_padded][ld], times scale; padding rows and columns are zero.
// `block` names rows of keys as well as of queries.
template <class V>
void read_rows(const TensorView& t, const QueryBlock& block, int64_t rows_padded, int64_t cols,
               typename V::Scalar scale, typename V::Scalar* dst, int64_t ld) {
  if constexpr (sizeof(typename V::Scalar) == sizeof(double)) {
    read_rows_of<V, double>(t, block, cols, scale, dst, ld);
  } else if (t.type == ElementType::BFloat16) {
    read_rows_of<V, BFloat16>(t, block, cols, scale, dst, ld);
  } else if (t.type == ElementType::Float16) {
    read_rows_of<V, Float16>(t, block, cols, scale, dst, ld);
  } else {
    read_rows_of<V, float>(t, block, cols, scale, dst, ld);
  }
  __builtin_memset(dst + block.count * ld, 0,
                   static_cast<size_t>((rows_padded - block.count) * ld) * sizeof(typename V::Scalar));
}

template <typename Element, typename Scalar>
void write_rows_of(const MutableTensorView& t, const QueryBlock& block, int64_t cols, const Scalar* src, int64_t ld) {
  Element* dst =
      static_cast<Element*>(t.data) + block.batch * t.stride_b + block.head * t.stride_h + block.begin * t.stride_t;
  for (int64_t r = 0; r < block.count; ++r) {
    Element* row = dst + r * t.stride_t;
    if (t.stride_d == 1) {
      for (int64_t c = 0; c < cols; ++c) narrow(src[r * ld + c], row[c]);
    } else {
      for (int64_t c = 0; c < cols; ++c) narrow(src[r * ld + c], row[c * t.stride_d]);
    }
  }
}

MHA_EXT_INLINE void write_rows(const MutableTensorView& t, const QueryBlock& block, int64_t cols, const float* src,
                               int64_t ld) {
  if (t.type == ElementType::BFloat16) {
    write_rows_of<BFloat16>(t, block, cols, src, ld);
  } else if (t.type == ElementType::Float16) {
    write_rows_of<Float16>(t, block, cols, src, ld);
  } else {
    write_rows_of<float>(t, block, cols, src, ld);
  }
}

MHA_EXT_INLINE void write_rows(const MutableTensorView& t, const QueryBlock& block, int64_t cols, const double* src,
                               int64_t ld) {
  write_rows_of<double>(t, block, cols, src, ld);
}

MHA_EXT_INLINE float largest_of(ElementType half_type) {
  return half_type == ElementType::BFloat16 ? 0x1.fep127f : 65504.0f;
}

// What is finite in a half type is itself, and infinity its largest number: what lost_in is measured against.
MHA_EXT_INLINE float limited(float x, float largest) { return x > largest ? largest : x < -largest ? -largest : x; }

// dst, rows of a tensor of a half type, with what rounding took from them.
inline void add_rounding(const TensorView& t, ElementType type, const QueryBlock& block, int64_t cols, float* dst,
                         int64_t ld) {
  const float largest = largest_of(type);
  const auto* src = static_cast<const BFloat16*>(t.data) + block.batch * t.stride_b + block.head * t.stride_h +
                    block.begin * t.stride_t;
  for (int64_t r = 0; r < block.count; ++r) {
    for (int64_t c = 0; c < cols; ++c) {
      dst[r * ld + c] = limited(dst[r * ld + c], largest) + widen(src[r * t.stride_t + c * t.stride_d]);
    }
  }
}

// Rows of O as the forward pass computed it.
template <class V>
void read_output(const BackwardParams& b, const QueryBlock& block, int64_t rows_padded, typename V::Scalar* dst,
                 int64_t ld) {
  read_rows<V>(b.out, block, rows_padded, b.attention.value_dim, typename V::Scalar(1), dst, ld);
  if constexpr (sizeof(typename V::Scalar) == sizeof(float)) {
    if (b.rounding.data != nullptr) {
      add_rounding(b.rounding, b.out.type, block, b.attention.value_dim, dst, ld);
    }
  }
}

template <typename Element>
MHA_EXT_INLINE BFloat16 lost_in(float x, float largest) {
  Element rounded;
  narrow(x, rounded);
  BFloat16 result;
  narrow(x - limited(widen(rounded), largest), result);
  return result;
}

// What write_rows loses where `type` is a half type.
inline void write_rounding(const MutableTensorView& t, ElementType type, const QueryBlock& block, int64_t cols,
                           const float* src, int64_t ld) {
  auto* dst =
      static_cast<BFloat16*>(t.data) + block.batch * t.stride_b + block.head * t.stride_h + block.begin * t.stride_t;
  for (int64_t r = 0; r < block.count; ++r) {
    BFloat16* row = dst + r * t.stride_t;
    const float* x = src + r * ld;
    if (type == ElementType::BFloat16) {
      for (int64_t c = 0; c < cols; ++c) row[c * t.stride_d] = lost_in<BFloat16>(x[c], largest_of(type));
    } else {
      for (int64_t c = 0; c < cols; ++c) row[c * t.stride_d] = lost_in<Float16>(x[c], largest_of(type));
    }
  }
}

struct Unchanged {
  template <class Vec>
  MHA_EXT_INLINE Vec operator()(Vec x, int64_t /*col*/) const {
    return x;
  }
};

// dst[c][r] = change(src[r][c]) for r < rows, c < cols, both multiples of the vector width. A W x W block is
// turned in log2(W) rounds, each interleaving row i with row i + W/2. `change` is told the column that a vector of src
// begins at.
template <class V, class Change = Unchanged>
void transpose(const typename V::Scalar* src, int64_t lds, int64_t rows, int64_t cols, typename V::Scalar* dst,
               int64_t ldd, const Change& change = {}) {
  constexpr int W = V::kWidth;
  for (int64_t r = 0; r < rows; r += W) {
    for (int64_t c = 0; c < cols; c += W) {
      typename V::Vec x[W], y[W];
#pragma GCC unroll 16
      for (int i = 0; i < W; ++i) x[i] = change(V::load(src + (r + i) * lds + c), c);
#pragma GCC unroll 4
      for (int round = 1; round < W; round *= 2) {
#pragma GCC unroll 8
        for (int i = 0; i < W / 2; ++i) {
          y[2 * i] = V::interleave_low(x[i], x[i + W / 2]);
          y[2 * i + 1] = V::interleave_high(x[i], x[i + W / 2]);
        }
#pragma GCC unroll 16
        for (int i = 0; i < W; ++i) x[i] = y[i];
      }
#pragma GCC unroll 16
      for (int i = 0; i < W; ++i) V::store(dst + (c + i) * ldd + r, x[i]);
    }
  }
}

// The rows that `block` names, if they lie as a scratch copy of them would ([rows_padded][ld], its rows perhaps further
// apart); else null.
template <class V, class View>
MHA_EXT_INLINE auto rows_in_place(const View& t, const QueryBlock& block, int64_t rows_padded, int64_t cols,
                                  int64_t ld) {
  using Scalar = typename V::Scalar;
  using Pointer = decltype(pointer_to<Scalar>(t.data));
  if (t.type != kTypeOf<Scalar> || t.stride_d != 1 || cols != ld || block.count != rows_padded) return Pointer{nullptr};
  return pointer_to<Scalar>(t.data) + block.batch * t.stride_b + block.head * t.stride_h + block.begin * t.stride_t;
}

// Rows of a tensor turned into columns [ld][rows_padded] of scratch; `rows` is scratch for a copy of them.
template <class V>
void read_columns(const TensorView& t, const QueryBlock& block, int64_t rows_padded, int64_t cols,
                  typename V::Scalar scale, typename V::Scalar* rows, int64_t ld, typename V::Scalar* dst) {
  if (const auto* src = rows_in_place<V>(t, block, rows_padded, cols, ld)) {
    transpose<V>(src, t.stride_t, rows_padded, ld, dst, rows_padded, [=](auto x, int64_t) { return x * scale; });
    return;
  }
  read_rows<V>(t, block, rows_padded, cols, scale, rows, ld);
  transpose<V>(rows, ld, rows_padded, ld, dst, rows_padded);
}

// The reverse, for a result in columns; `change` as in transpose.
template <class V, class Change>
void write_columns(const MutableTensorView& t, const QueryBlock& block, int64_t rows_padded, int64_t cols,
                   const typename V::Scalar* columns, typename V::Scalar* rows, int64_t ld, const Change& change) {
  if (auto* dst = rows_in_place<V>(t, block, rows_padded, cols, ld)) {
    transpose<V>(columns, rows_padded, ld, rows_padded, dst, t.stride_t, change);
    return;
  }
  transpose<V>(columns, rows_padded, ld, rows_padded, rows, ld, change);
  write_rows(t, block, cols, rows, ld);
}

}  // namespace
}  // namespace mha_ext::kernels
