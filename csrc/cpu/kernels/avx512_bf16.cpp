// AVX-512 with bfloat16 products (AVX512_BF16): twice as many multiply-adds an instruction as in float32.
// The instruction takes subnormal numbers, in and out, for zeros.
#include "avx512.inl.h"
#include "kernels.inl.h"

namespace mha_ext::kernels {
namespace {

struct Avx512Bf16 : Avx512<float> {
  using Term = BFloat16Pair;
  static constexpr bool kMultipliesPairs = true;

  using Avx512<float>::add_product;
  using Avx512<float>::broadcast;
  using Avx512<float>::load;
  static MHA_EXT_INLINE __m512bh load(const Term* p) {
    return reinterpret_cast<__m512bh>(_mm512_loadu_si512(reinterpret_cast<const void*>(p)));
  }
  static MHA_EXT_INLINE __m512bh broadcast(Term pair) {
    int32_t bits;
    __builtin_memcpy(&bits, &pair, sizeof(bits));
    return reinterpret_cast<__m512bh>(_mm512_set1_epi32(bits));
  }
  static MHA_EXT_INLINE Vec add_product(Vec sum, __m512bh a, __m512bh b) { return _mm512_dpbf16_ps(sum, a, b); }
};

}  // namespace

extern const KernelTable kAvx512Bf16 = kernel_table<Avx512Bf16>();

}  // namespace mha_ext::kernels
