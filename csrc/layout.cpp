#include "layout.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/empty_strided.h>

#include <algorithm>
#include <array>

#include "attention.h"

namespace mha_ext {
namespace {

using Axes = std::array<int64_t, 4>;

// What cannot be decided while sizes are symbolic counts as false: the strides of one trace serve all its sizes.
bool lies_outside(const at::Tensor& t, int64_t axis, int64_t other) {
  return t.sym_stride(axis).sym_gt(t.sym_stride(other)).guard_or_false(__FILE__, __LINE__);
}

// Axes from the slowest to the fastest. An axis of stride 0 (expanded) says nothing about the order.
Axes memory_order(const at::Tensor& query) {
  if (lies_outside(query, 1, 2)) return {0, 1, 2, 3};
  const bool expanded = query.sym_stride(0).sym_eq(0).guard_or_false(__FILE__, __LINE__);
  if (!expanded && lies_outside(query, 2, 0)) return {2, 0, 1, 3};
  return {0, 2, 1, 3};
}

Axes inverse(const Axes& order) {
  Axes result{};
  for (int64_t i = 0; i < 4; ++i) result[order[i]] = i;
  return result;
}

}  // namespace

at::Tensor empty_like_query(const at::Tensor& query, const c10::SymInt& width, const at::TensorOptions& options) {
  const Axes order = memory_order(query);
  if (!query.unsafeGetTensorImpl()->has_symbolic_sizes_strides() && !width.is_symbolic()) {
    // At once, without a view: for one token that is a tenth of the call.
    Axes sizes{}, strides{};
    int64_t stride = 1;
    for (int64_t i = 3; i >= 0; --i) {
      const int64_t axis = order[i];
      sizes[axis] = axis == 3 ? width.expect_int() : query.size(axis);
      strides[axis] = stride;
      stride *= std::max<int64_t>(sizes[axis], 1);
    }
    return at::empty_strided(sizes, strides, options);
  }
  std::array<c10::SymInt, 4> sizes, strides;
  c10::SymInt stride = 1;
  for (int64_t i = 3; i >= 0; --i) {
    const int64_t axis = order[i];
    sizes[axis] = axis == 3 ? width : query.sym_size(axis);
    strides[axis] = stride;
    stride = stride * sizes[axis].max(1);
  }
  return at::empty_strided_symint(sizes, strides, options);
}

at::Tensor empty_like_query(const at::Tensor& query, const c10::SymInt& width) {
  return empty_like_query(query, width, query.options());
}

at::Tensor empty_rounding(const at::Tensor& query, const c10::SymInt& width) {
  const at::TensorOptions options = query.options().dtype(at::kBFloat16);
  return is_half(query) ? empty_like_query(query, width, options) : at::empty({0}, options);
}

at::Tensor lay_out_like_query(const at::Tensor& values, const at::Tensor& query) {
  const Axes order = memory_order(query);
  return values.permute(order).contiguous().permute(inverse(order));
}

}  // namespace mha_ext
