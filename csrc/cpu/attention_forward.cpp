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

at::Tensor attention_into(const AttentionArguments& args, const at::Tensor& out) {
  const BoundArguments bound = bind(args);
  const at::ScalarType type = compute_type(args.query);
  kernels::ForwardParams forward{bound.params, mutable_view_of(out), nullptr};
  kernels::AttentionParams& p = forward.attention;
  const at::Tensor lse = at::empty({p.batch, p.heads, p.num_queries}, args.query.options().dtype(type));
  if (lse.numel() == 0) return lse;
  forward.lse = lse.mutable_data_ptr();

  const kernels::KernelTable& kernel = kernels_for(type);
  if (runs_as_few(p.num_queries, kernel)) {
    attend_few(forward, kernel, lse.options());
    return lse;
  }
  p.query_block = query_block_size(p.num_queries, kernel.vector_width,
                                   most_forward_queries(p.num_queries, p.batch * p.heads, thread_count()));
  const int64_t blocks = divide_up(p.num_queries, p.query_block);
  const double multiply_adds = static_cast<double>(p.query_block) * static_cast<double>(p.num_keys) *
                               static_cast<double>(p.head_dim + p.value_dim);
  parallel_units(p.batch * p.heads * blocks, multiply_adds, kernel.forward_scratch_bytes(p),
                 [&](int64_t unit, void* scratch) {
                   const int64_t row = unit / blocks;
                   // Last block first: under a causal mask it is the longest.
                   const int64_t begin = (blocks - 1 - unit % blocks) * p.query_block;
                   const int64_t count = std::min(p.query_block, p.num_queries - begin);
                   kernel.forward_block(forward, {row / p.heads, row % p.heads, begin, count}, scratch);
                 });
  return lse;
}

namespace {

AttentionResult attention(const AttentionArguments& args) {
  check_attention("attention", args);
  const at::Tensor out = empty_like_query(args.query, args.value.size(3));
  return {out, attention_into(args, out)};
}

}  // namespace

TORCH_LIBRARY_IMPL(mha_ext, CPU, m) { m.impl("attention", &attention_kernel<attention>); }

}  // namespace mha_ext::cpu
