#include "few_queries.h"

#include <ATen/ops/empty.h>

#include "parallel.h"

namespace mha_ext::cpu {

void attend_few(kernels::ForwardParams& forward, const kernels::KernelTable& kernel, const at::TensorOptions& options) {
  const kernels::AttentionParams& p = forward.attention;
  const int64_t group_rows = p.heads / p.kv_heads * p.num_queries;
  const int64_t blocks = divide_up(group_rows, kernel.few_rows), block = divide_up(group_rows, blocks);
  const int64_t range = few_range_size(p.num_keys), ranges = std::max<int64_t>(1, divide_up(p.num_keys, range));
  const int64_t queries = p.batch * p.heads * p.num_queries;
  at::Tensor partial;
  if (ranges > 1) {
    partial = at::empty({ranges * queries * kernel.forward_few_partial_size(p)}, options);
    forward.partial = partial.mutable_data_ptr();
    forward.range_keys = range;
  }
  // Reading a key and a value costs about as much as four rows' multiplications with them.
  const double multiply_adds = static_cast<double>(std::max<int64_t>(block, 4)) * static_cast<double>(range) *
                               static_cast<double>(p.head_dim + p.value_dim);
  const size_t scratch_bytes = kernel.forward_few_scratch_bytes(p);
  parallel_units(p.batch * p.kv_heads * blocks * ranges, multiply_adds, scratch_bytes,
                 [&](int64_t unit, void* scratch) {
                   const int64_t part = unit / ranges % blocks, head = unit / (ranges * blocks);
                   const int64_t begin = unit % ranges * range, end = std::min(begin + range, p.num_keys);
                   kernel.forward_few(forward, {part * block, std::min(block, group_rows - part * block)},
                                      {head / p.kv_heads, head % p.kv_heads, begin, end}, scratch);
                 });
  if (ranges == 1) return;
  parallel_units(queries, static_cast<double>(ranges * p.value_dim), scratch_bytes, [&](int64_t unit, void* scratch) {
    const int64_t row = unit / p.num_queries;
    kernel.merge_few(forward, {row / p.heads, row % p.heads, unit % p.num_queries, 1}, ranges, scratch);
  });
}

}  // namespace mha_ext::cpu
