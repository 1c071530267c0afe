// AVX2 and FMA: 32-byte vectors, 16 registers (4 x 3 accumulators, 3 right-hand vectors, 1 broadcast).
#include <immintrin.h>

#include "kernels.inl.h"

namespace mha_ext::kernels {
namespace {

template <typename Scalar>
struct Avx2;

template <>
struct Avx2<float> : Simd<float, 32> {
  using Simd<float, 32>::load;
  static MHA_EXT_INLINE Vec load(const Float16* p) {
    return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
  }
  static constexpr int kGemmRows = 4, kGemmCols = 3, kFewSixteenths = 16, kLinearRows = 32;
  static MHA_EXT_INLINE IntVec widen_bytes(const uint8_t* p) {
    return reinterpret_cast<IntVec>(_mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p))));
  }
  static MHA_EXT_INLINE Vec max(Vec a, Vec b) { return _mm256_max_ps(a, b); }
  static MHA_EXT_INLINE Vec interleave_low(Vec a, Vec b) {
    return __builtin_shufflevector(a, b, 0, 8, 1, 9, 2, 10, 3, 11);
  }
  static MHA_EXT_INLINE Vec interleave_high(Vec a, Vec b) {
    return __builtin_shufflevector(a, b, 4, 12, 5, 13, 6, 14, 7, 15);
  }
};

template <>
struct Avx2<double> : Simd<double, 32> {
  static constexpr int kGemmRows = 4, kGemmCols = 3, kFewSixteenths = 12, kLinearRows = 32;
  static MHA_EXT_INLINE IntVec widen_bytes(const uint8_t* p) {
    return reinterpret_cast<IntVec>(_mm256_cvtepi8_epi64(_mm_loadu_si32(p)));
  }
  static MHA_EXT_INLINE Vec max(Vec a, Vec b) { return _mm256_max_pd(a, b); }
  static MHA_EXT_INLINE Vec interleave_low(Vec a, Vec b) { return __builtin_shufflevector(a, b, 0, 4, 1, 5); }
  static MHA_EXT_INLINE Vec interleave_high(Vec a, Vec b) { return __builtin_shufflevector(a, b, 2, 6, 3, 7); }
};

}  // namespace

extern const InstructionSet kAvx2 = {"avx2", kernel_table<Avx2<float>>(), kernel_table<Avx2<double>>()};

}  // namespace mha_ext::kernels
