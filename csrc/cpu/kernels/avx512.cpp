// AVX-512.
#include "avx512.inl.h"
#include "kernels.inl.h"

namespace mha_ext::kernels {

extern const InstructionSet kAvx512 = {"avx512", kernel_table<Avx512<float>>(), kernel_table<Avx512<double>>()};

}  // namespace mha_ext::kernels
