// A linear map of a few rows, as its kernel is given it.
#pragma once

#include <stdint.h>

#include "params.h"

namespace mha_ext::kernels {

// out[m][n] = bias[n] + sum_k input[m][k] * weight[n][k], everything of one type and with unit strides along the last
// axis; bias may be null. Where bfloat16 is multiplied in pairs, k runs to an even number and weight_stride is even.
struct LinearRows {
  ElementType type = ElementType::Float32;
  const void* input = nullptr;
  const void* weight = nullptr;
  const void* bias = nullptr;
  void* out = nullptr;
  int64_t rows = 0, depth = 0;
  int64_t input_stride = 0, weight_stride = 0, out_stride = 0;
};

// out[n][k] = sum_m left[m][n] * right[m][k]: the gradient of a linear map's weight. Everything in the compute type and
// with unit strides along the last axis; n in whole blocks of kLinearBlock, k in whole vectors.
struct SumOfRows {
  const void* left = nullptr;
  const void* right = nullptr;
  void* out = nullptr;
  int64_t rows = 0, width = 0;  // of m and k
  int64_t left_stride = 0, right_stride = 0;
};

// Terms or outputs that a call about many rows takes at once.
constexpr int64_t kLinearBlock = 64;

}  // namespace mha_ext::kernels
