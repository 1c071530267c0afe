// A linear map of a few rows, as its kernel is given it.
#pragma once

#include <stdint.h>

namespace mha_ext::kernels {

// out[m][n] = bias[n] + sum_k input[m][k] * weight[n][k], everything in the compute type and with unit strides along
// the last axis; bias may be null.
struct LinearRows {
  const void* input = nullptr;
  const void* weight = nullptr;
  const void* bias = nullptr;
  void* out = nullptr;
  int64_t rows = 0, depth = 0;
  int64_t input_stride = 0, weight_stride = 0, out_stride = 0;
};

// Terms or outputs that a call about many rows takes at once.
constexpr int64_t kLinearBlock = 64;

}  // namespace mha_ext::kernels
