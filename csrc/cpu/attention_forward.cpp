// attention on CPU: out = softmax(scale Q K^T + mask) V and its log-sum-exp, in memory linear in T.
#include <ATen/ops/empty.h>
#include <torch/library.h>

#include "../checks.h"
#include "../layout.h"
#include "../signatures.h"
#include "arguments.h"
#include "few_queries.h"
#include "forward_into.h"
#include "parallel.h"

namespace mha_ext::cpu {

namespace {

// Blocks of queries; those that would fill little of a last vector run with the kernel for few.
void attend_in_blocks(kernels::ForwardParams& forward, const kernels::KernelTable& kernel) {
  kernels::AttentionParams& p = forward.attention;
  const int64_t rest = p.num_queries % kernel.vector_width;
  const int64_t few = p.num_queries > rest && runs_as_few(rest, kernel) ? rest : 0, queries = p.num_queries - few;
  const int64_t rows = p.batch * p.heads, group = p.heads / p.kv_heads;
  p.query_block = query_block_size(queries, kernel.vector_width, most_forward_queries(queries, rows, thread_count()));
  const int64_t blocks = divide_up(queries, p.query_block);
  const double multiply_adds = static_cast<double>(p.query_block) * static_cast<double>(p.num_keys) *
                               static_cast<double>(p.head_dim + p.value_dim);
  const size_t scratch_bytes =
      std::max(kernel.forward_scratch_bytes(p), few > 0 ? kernel.forward_few_scratch_bytes(p) : size_t{0});
  parallel_units(rows * blocks, multiply_adds, scratch_bytes, [&](int64_t unit, void* scratch) {
    const int64_t batch = unit / blocks / p.heads, head = unit / blocks % p.heads;
    // Last block first: under a causal mask it is the longest.
    const int64_t block = blocks - 1 - unit % blocks, begin = block * p.query_block;
    kernel.forward_block(forward, {batch, head, begin, std::min(p.query_block, queries - begin)}, scratch);
    if (few > 0 && block == blocks - 1) {
      kernel.forward_few(forward, {head % group * p.num_queries + queries, few}, {batch, head / group, 0, p.num_keys},
                         scratch);
    }
  });
}

}  // namespace

at::Tensor attention_into(const AttentionArguments& args, const OutputTargets& targets) {
  const BoundArguments bound = bind(args);
  const at::ScalarType type = compute_type(args.query);
  kernels::ForwardParams forward = bind_outputs(bound, targets);
  kernels::AttentionParams& p = forward.attention;
  const at::Tensor lse = at::empty({p.batch, p.heads, p.num_queries}, args.query.options().dtype(type));
  if (lse.numel() == 0) return lse;
  forward.lse = lse.mutable_data_ptr();

  const kernels::KernelTable& kernel = kernels_for(args);
  if (runs_as_few(p.num_queries, kernel)) {
    attend_few(forward, kernel, lse.options());
    return lse;
  }
  attend_in_blocks(forward, kernel);
  return lse;
}

namespace {

AttentionResult attention(const AttentionArguments& args) {
  check_attention("attention", args);
  const at::Tensor out = empty_like_query(args.query, args.value.size(3));
  return {out, attention_into(args, {out})};
}

ForBackwardResult attention_for_backward(const AttentionArguments& args, int64_t weights) {
  check_attention_for_backward(args, weights);
  const int64_t width = args.value.size(3);
  const OutputTargets targets{empty_like_query(args.query, width), empty_rounding(args.query, width)};
  if (weights == kNoWeights) {
    return {targets.out, attention_into(args, targets), at::empty({0}, args.query.options()), targets.rounding};
  }
  const auto [lse, matrix] = attention_with_weights_into(args, weights == kMeanWeights, targets);
  return {targets.out, lse, matrix, targets.rounding};
}

}  // namespace

TORCH_LIBRARY_IMPL(mha_ext, CPU, m) {
  m.impl("attention", &attention_kernel<attention>);
  m.impl("attention_for_backward", &attention_for_backward_kernel<attention_for_backward>);
}

}  // namespace mha_ext::cpu
