// All kernels, as the table of one instruction set.
#pragma once

#include "backward_range.inl.h"
#include "few_backward.inl.h"
#include "few_queries.inl.h"
#include "forward_tile.inl.h"
#include "kernel_table.h"
#include "linear_columns.inl.h"
#include "linear_rows.inl.h"
#include "mask_gradient.inl.h"
#include "tangent_backward.inl.h"
#include "weights_tile.inl.h"

namespace mha_ext::kernels {
namespace {

template <class V>
constexpr KernelTable kernel_table() {
  KernelTable table{};
  table.forward_block = forward_block<V>;
  table.forward_scratch_bytes = forward_scratch_bytes<V>;
  table.forward_few = forward_few<V>;
  table.merge_few = merge_few<V>;
  table.forward_few_scratch_bytes = forward_few_scratch_bytes<V>;
  table.forward_few_partial_size = few_partial_size<V>;
  table.few_rows = kFewRows;
  table.few_sixteenths = V::kFewSixteenths;
  table.backward_few = backward_few<V>;
  table.backward_few_scratch_bytes = backward_few_scratch_bytes<V>;
  table.backward_range = backward_range<V>;
  table.backward_scratch_bytes = backward_scratch_bytes<V>;
  table.mask_gradient_block = mask_gradient_block<V>;
  table.mask_gradient_scratch_bytes = mask_gradient_scratch_bytes<V>;
  if constexpr (!V::kMultipliesPairs) {
    table.tangent_block = tangent_block<V>;
    table.tangent_scratch_bytes = tangent_scratch_bytes<V>;
    table.tangent_backward_range = tangent_backward_range<V>;
    table.tangent_backward_scratch_bytes = tangent_backward_scratch_bytes<V>;
    table.tangent_mask_gradient_block = tangent_mask_gradient_block<V>;
  }
  table.weights_block = weights_block<V>;
  table.weights_scratch_bytes = weights_scratch_bytes<V>;
  table.most_linear_rows = V::kLinearRows;
  table.linear_rows = linear_rows<V>;
  table.turn_linear_input = turn_linear_input<V>;
  table.linear_columns = linear_columns<V>;
  table.linear_scratch_bytes = linear_scratch_bytes<V>;
  table.sum_of_rows = sum_of_rows<V>;
  table.map_mask_rows = map_mask_rows<V>;
  table.vector_width = V::kWidth;
  return table;
}

}  // namespace
}  // namespace mha_ext::kernels
