// AVX-512: 64-byte vectors, 32 registers (8 x 3 accumulators, 3 right-hand vectors, the broadcasts from memory).
// The zero-masked forms under a full mask are the plain instructions; the plain intrinsics of GCC 12 read a variable
// that they never set (GCC bug 105593).
#pragma once

#ifdef MHA_EXT_EMULATE_AVX512
#include "avx512_emulated.h"
#else
#include <immintrin.h>
#endif

#include "simd.inl.h"

namespace mha_ext::kernels {
namespace {

template <typename Scalar>
struct Avx512;

template <>
struct Avx512<float> : Simd<float, 64> {
  using Simd<float, 64>::load;
  static MHA_EXT_INLINE Vec load(const Float16* p) {
    return _mm512_maskz_cvtph_ps(0xffff, _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
  }
  static constexpr int kGemmRows = 8, kGemmCols = 3, kFewSixteenths = 9, kLinearRows = 128;
  static MHA_EXT_INLINE IntVec widen_bytes(const uint8_t* p) {
    return reinterpret_cast<IntVec>(
        _mm512_maskz_cvtepi8_epi32(0xffff, _mm_loadu_si128(reinterpret_cast<const __m128i*>(p))));
  }
  static MHA_EXT_INLINE Vec max(Vec a, Vec b) { return _mm512_maskz_max_ps(0xffff, a, b); }
  // Which the compiler does not fuse with what comes next.
  static MHA_EXT_INLINE Vec rounded_product(Vec a, Vec b) {
    return _mm512_maskz_mul_round_ps(0xffff, a, b, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
  }
  static MHA_EXT_INLINE Vec scale_by_power_of_two(Vec p, Vec /*shifted*/, Vec n) {
    return _mm512_maskz_scalef_ps(0xffff, p, n);
  }
  static MHA_EXT_INLINE Vec interleave_low(Vec a, Vec b) {
    return __builtin_shufflevector(a, b, 0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23);
  }
  static MHA_EXT_INLINE Vec interleave_high(Vec a, Vec b) {
    return __builtin_shufflevector(a, b, 8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31);
  }
};

template <>
struct Avx512<double> : Simd<double, 64> {
  static constexpr int kGemmRows = 8, kGemmCols = 3, kFewSixteenths = 12, kLinearRows = 128;
  static MHA_EXT_INLINE IntVec widen_bytes(const uint8_t* p) {
    return reinterpret_cast<IntVec>(
        _mm512_maskz_cvtepi8_epi64(0xff, _mm_loadl_epi64(reinterpret_cast<const __m128i*>(p))));
  }
  static MHA_EXT_INLINE Vec max(Vec a, Vec b) { return _mm512_maskz_max_pd(0xff, a, b); }
  static MHA_EXT_INLINE Vec scale_by_power_of_two(Vec p, Vec /*shifted*/, Vec n) {
    return _mm512_maskz_scalef_pd(0xff, p, n);
  }
  static MHA_EXT_INLINE Vec interleave_low(Vec a, Vec b) {
    return __builtin_shufflevector(a, b, 0, 8, 1, 9, 2, 10, 3, 11);
  }
  static MHA_EXT_INLINE Vec interleave_high(Vec a, Vec b) {
    return __builtin_shufflevector(a, b, 4, 12, 5, 13, 6, 14, 7, 15);
  }
};

}  // namespace
}  // namespace mha_ext::kernels
