// The AVX-512 instructions that the kernels name, in terms of narrower ones: any x86 processor with AVX2 can then run
// the kernels of avx512.cpp and avx512_bf16.cpp, slowly. For tests: compiled with -mno-avx512f and
// -DMHA_EXT_EMULATE_AVX512 (.ci/lint).
#pragma once

#include <immintrin.h>
#include <stdint.h>

namespace mha_ext::kernels {
namespace {
namespace emulated {

#define MHA_EXT_EMULATED static inline __attribute__((always_inline))

template <typename Scalar>
using Vec __attribute__((vector_size(64))) = Scalar;
using Pairs = Vec<uint16_t>;  // what __m512bh is

MHA_EXT_EMULATED Vec<float> widen_halves(__m256i halves) {
  const __m256 low = _mm256_cvtph_ps(_mm256_castsi256_si128(halves));
  const __m256 high = _mm256_cvtph_ps(_mm256_extracti128_si256(halves, 1));
  Vec<float> result;
  __builtin_memcpy(&result, &low, sizeof(low));
  __builtin_memcpy(reinterpret_cast<char*>(&result) + sizeof(low), &high, sizeof(high));
  return result;
}

template <typename Int>
MHA_EXT_EMULATED Vec<Int> widen_bytes(__m128i bytes) {
  int8_t values[16];
  __builtin_memcpy(values, &bytes, sizeof(values));
  Vec<Int> result;
  for (unsigned i = 0; i < sizeof(result) / sizeof(Int); ++i) result[i] = values[i];
  return result;
}

// The second operand where they do not compare, as the instruction.
template <typename Vector>
MHA_EXT_EMULATED Vector larger(Vector a, Vector b) {
  return a > b ? a : b;
}

// x 2^floor(n), rounded once.
template <typename Vector>
MHA_EXT_EMULATED Vector scaled(Vector x, Vector n) {
  constexpr double kBeyond = 5000;  // every number is 0 or infinite then
  Vector result;
  for (unsigned i = 0; i < sizeof(x) / sizeof(x[0]); ++i) {
    const double power = n[i] > kBeyond ? kBeyond : n[i] < -kBeyond ? -kBeyond : __builtin_floor(n[i]);
    result[i] = n[i] != n[i] ? n[i] : __builtin_ldexp(x[i], static_cast<int>(power));
  }
  return result;
}

MHA_EXT_EMULATED Vec<float> rounded_product(Vec<float> a, Vec<float> b) {
  Vec<float> result = a * b;
  asm("" : "+m"(result));
  return result;
}

MHA_EXT_EMULATED Pairs load_pairs(const void* p) {
  Pairs result;
  __builtin_memcpy(&result, p, sizeof(result));
  return result;
}

MHA_EXT_EMULATED Vec<int32_t> in_every_lane(int32_t x) { return Vec<int32_t>{} + x; }

// Both products of each pair join the sum; the instruction's zeros for subnormal numbers are left out.
MHA_EXT_EMULATED Vec<float> add_products(Vec<float> sum, Pairs a, Pairs b) {
  const auto x = reinterpret_cast<Vec<uint32_t>>(a), y = reinterpret_cast<Vec<uint32_t>>(b);
  const auto high = [](Vec<uint32_t> v) { return reinterpret_cast<Vec<float>>(v & 0xffff0000u); };
  const auto low = [](Vec<uint32_t> v) { return reinterpret_cast<Vec<float>>(v << 16); };
  return sum + high(x) * high(y) + low(x) * low(y);
}

}  // namespace emulated
}  // namespace
}  // namespace mha_ext::kernels

#define __m512bh emulated::Pairs
#define _mm512_maskz_cvtph_ps(mask, halves) emulated::widen_halves(halves)
#define _mm512_maskz_cvtepi8_epi32(mask, bytes) emulated::widen_bytes<int32_t>(bytes)
#define _mm512_maskz_cvtepi8_epi64(mask, bytes) emulated::widen_bytes<int64_t>(bytes)
#define _mm512_maskz_max_ps(mask, a, b) emulated::larger(a, b)
#define _mm512_maskz_max_pd(mask, a, b) emulated::larger(a, b)
#define _mm512_maskz_scalef_ps(mask, x, n) emulated::scaled(x, n)
#define _mm512_maskz_scalef_pd(mask, x, n) emulated::scaled(x, n)
#define _mm512_maskz_mul_round_ps(mask, a, b, mode) emulated::rounded_product(a, b)
#define _mm512_loadu_si512(p) emulated::load_pairs(p)
#define _mm512_set1_epi32(x) emulated::in_every_lane(x)
#define _mm512_dpbf16_ps(sum, a, b) emulated::add_products(sum, a, b)
