// How results on heads lie in memory.
#pragma once

#include <ATen/core/Tensor.h>

namespace mha_ext {

// Uninitialized (B, H, T, width), its axes in the order in which query's (B, H, T, D) lie: (B, H, T), (T, B, H) or
// (B, T, H). So a caller can view the output as it could view query.
at::Tensor empty_like_query(const at::Tensor& query, const c10::SymInt& width);
at::Tensor empty_like_query(const at::Tensor& query, const c10::SymInt& width, const at::TensorOptions& options);

// The same for what rounding took from such an output: bfloat16, and empty where query is no half type.
at::Tensor empty_rounding(const at::Tensor& query, const c10::SymInt& width);

// (B, H, T, X) values, copied unless they lie like that already.
at::Tensor lay_out_like_query(const at::Tensor& values, const at::Tensor& query);

}  // namespace mha_ext
