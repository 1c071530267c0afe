// The portable kernels: 16-byte vectors of the compiler's own, on any processor.
#include "kernels.inl.h"

namespace mha_ext::kernels {
namespace {

template <typename Scalar>
struct Portable;

template <>
struct Portable<float> : Simd<float, 16> {
  static constexpr int kGemmRows = 4, kGemmCols = 2, kFewSixteenths = 16, kLinearRows = 8;
  static MHA_EXT_INLINE Vec interleave_low(Vec a, Vec b) { return __builtin_shufflevector(a, b, 0, 4, 1, 5); }
  static MHA_EXT_INLINE Vec interleave_high(Vec a, Vec b) { return __builtin_shufflevector(a, b, 2, 6, 3, 7); }
};

template <>
struct Portable<double> : Simd<double, 16> {
  static constexpr int kGemmRows = 4, kGemmCols = 2, kFewSixteenths = 16, kLinearRows = 8;
  static MHA_EXT_INLINE Vec interleave_low(Vec a, Vec b) { return __builtin_shufflevector(a, b, 0, 2); }
  static MHA_EXT_INLINE Vec interleave_high(Vec a, Vec b) { return __builtin_shufflevector(a, b, 1, 3); }
};

}  // namespace

extern const InstructionSet kPortable = {"default", kernel_table<Portable<float>>(), kernel_table<Portable<double>>()};

}  // namespace mha_ext::kernels
