// A vector of lanes, written once over the compiler's vector extensions (GCC and Clang). An instruction set derives
// from Simd and replaces what it does better; everything is in an anonymous namespace so that no object compiled for a
// newer processor exports a symbol that another object could be linked to.
#pragma once

#include <stddef.h>
#include <stdint.h>

#define MHA_EXT_INLINE inline __attribute__((always_inline))

namespace mha_ext::kernels {
namespace {

template <typename Scalar>
struct FloatFormat;

template <>
struct FloatFormat<float> {
  using Int = int32_t;
  using Bits = uint32_t;
  static constexpr int kMantissaBits = 23, kExponentBias = 127;
  static constexpr float kRoundToInteger =
      12582912.0f;  // 1.5 * 2^23: adding it leaves the rounded integer in the low bits
  static constexpr float kInfinity = __builtin_inff(), kLowest = -__FLT_MAX__;
};

template <>
struct FloatFormat<double> {
  using Int = int64_t;
  using Bits = uint64_t;
  static constexpr int kMantissaBits = 52, kExponentBias = 1023;
  static constexpr double kRoundToInteger = 6755399441055744.0;  // 1.5 * 2^52
  static constexpr double kInfinity = __builtin_inf(), kLowest = -__DBL_MAX__;
};

struct BFloat16 {
  uint16_t bits;
};
struct Float16 {
  uint16_t bits;
};

// Two neighbours of a bfloat16 product's sum.
struct __attribute__((packed, aligned(2), may_alias)) BFloat16Pair {
  uint16_t first, second;
};

template <typename ScalarType, int kBytes>
struct Simd {
  using Scalar = ScalarType;
  using Term = Scalar;
  using Format = FloatFormat<Scalar>;
  static constexpr int kWidth = kBytes / static_cast<int>(sizeof(Scalar));
  static constexpr Scalar kInfinity = Format::kInfinity;
  static constexpr bool kMultipliesPairs = false;  // products of bfloat16 by an instruction of their own
  static constexpr bool kMultipliesTiles = false;  // by one that takes tiles of 16 rows

  typedef Scalar Vec __attribute__((vector_size(kBytes)));
  typedef Scalar UnalignedVec __attribute__((vector_size(kBytes), aligned(sizeof(Scalar)), may_alias));
  typedef typename Format::Int IntVec __attribute__((vector_size(kBytes)));
  typedef typename Format::Bits BitVec __attribute__((vector_size(kBytes)));
  typedef int32_t Int32Vec __attribute__((vector_size(kWidth * 4)));
  typedef uint8_t ByteVec __attribute__((vector_size(kBytes)));
  typedef uint8_t UnalignedByteVec __attribute__((vector_size(kBytes), aligned(1), may_alias));
  typedef uint16_t HalfVec __attribute__((vector_size(kWidth * 2)));
  typedef uint16_t UnalignedHalfVec __attribute__((vector_size(kWidth * 2), aligned(2), may_alias));
  typedef uint32_t HashVec __attribute__((vector_size(kWidth * 4)));

  static MHA_EXT_INLINE Vec load(const Scalar* p) { return *reinterpret_cast<const UnalignedVec*>(p); }
  static MHA_EXT_INLINE void store(Scalar* p, Vec v) { *reinterpret_cast<UnalignedVec*>(p) = v; }
  // Numbers of the half types, of which there are as many as lanes of float.
  static MHA_EXT_INLINE Vec load(const BFloat16* p) {
    return reinterpret_cast<Vec>(__builtin_convertvector(load_halves(p), IntVec) << 16);
  }
  // Shifting the 10-bit mantissa into place leaves the exponent 112 too small; one multiplication mends it, for
  // subnormals too. Infinity and NaN keep all exponent bits set.
  static MHA_EXT_INLINE Vec load(const Float16* p) {
    const IntVec bits = __builtin_convertvector(load_halves(p), IntVec), magnitude = (bits & 0x7fff) << 13;
    const Vec finite = reinterpret_cast<Vec>(magnitude) * 0x1p112f;
    const IntVec special = magnitude | 0x7f800000;
    const IntVec number = magnitude >= (0x7c00 << 13) ? special : reinterpret_cast<IntVec>(finite);
    return reinterpret_cast<Vec>(number | ((bits & 0x8000) << 16));
  }
  static MHA_EXT_INLINE ByteVec load_bytes(const uint8_t* p) { return *reinterpret_cast<const UnalignedByteVec*>(p); }
  static MHA_EXT_INLINE void store_bytes(uint8_t* p, ByteVec v) { *reinterpret_cast<UnalignedByteVec*>(p) = v; }
  // One byte, 0 or 255, a lane.
  static MHA_EXT_INLINE IntVec widen_bytes(const uint8_t* p) {
    IntVec lanes;
    for (int i = 0; i < kWidth; ++i) lanes[i] = static_cast<int8_t>(p[i]);
    return lanes;
  }
  static MHA_EXT_INLINE Vec add_product(Vec sum, Vec a, Vec b) { return sum + a * b; }
  static MHA_EXT_INLINE Vec zero() { return Vec{}; }
  static MHA_EXT_INLINE Vec broadcast(Scalar s) { return s - Vec{}; }

  // NaN in either operand may or may not survive: callers never rely on it.
  static MHA_EXT_INLINE Vec max(Vec a, Vec b) { return a > b ? a : b; }
  static MHA_EXT_INLINE Vec select(IntVec condition, Vec yes, Vec no) { return condition ? yes : no; }
  static MHA_EXT_INLINE bool any(IntVec condition) {
    typename Format::Int bits = 0;
    for (int i = 0; i < kWidth; ++i) bits |= condition[i];
    return bits != 0;
  }

  // Set in lanes 0 ... count - 1.
  static MHA_EXT_INLINE IntVec first_lanes(int64_t count) {
    IntVec lane;
    for (int i = 0; i < kWidth; ++i) lane[i] = i;
    return lane < static_cast<typename Format::Int>(count);
  }

  // p * 2^n for an integer n in the range of normal numbers; `shifted` is n + kRoundToInteger. A NaN's bits overflow.
  static MHA_EXT_INLINE Vec scale_by_power_of_two(Vec p, Vec shifted, Vec /*n*/) {
    const BitVec exponent = (reinterpret_cast<BitVec>(shifted) + Format::kExponentBias) << Format::kMantissaBits;
    return p * reinterpret_cast<Vec>(exponent);
  }

  static MHA_EXT_INLINE HalfVec load_halves(const void* p) { return *static_cast<const UnalignedHalfVec*>(p); }
  static MHA_EXT_INLINE void store_halves(void* p, HalfVec v) { *static_cast<UnalignedHalfVec*>(p) = v; }

  static MHA_EXT_INLINE IntVec lane_mask(HashVec condition) {
    return __builtin_convertvector(reinterpret_cast<Int32Vec>(condition), IntVec);
  }
};

MHA_EXT_INLINE int64_t round_up(int64_t n, int64_t step) { return (n + step - 1) / step * step; }
MHA_EXT_INLINE int64_t min_of(int64_t a, int64_t b) { return a < b ? a : b; }
MHA_EXT_INLINE int64_t max_of(int64_t a, int64_t b) { return a > b ? a : b; }

// Hands out 64-byte aligned pieces of a scratch buffer; with a null base it only counts.
class Arena {
 public:
  explicit Arena(void* base) : base_(static_cast<char*>(base)) {}
  template <typename T>
  T* take(int64_t count) {
    char* piece = base_ + used_;
    used_ += static_cast<size_t>(round_up(count * static_cast<int64_t>(sizeof(T)), 64));
    return reinterpret_cast<T*>(piece);
  }
  size_t used() const { return used_; }

 private:
  char* base_;
  size_t used_ = 0;
};

}  // namespace
}  // namespace mha_ext::kernels
