// attention on CPU with its weights, per head or their mean over heads without a matrix a head; and their backward.
#include <ATen/ops/empty.h>
#include <torch/library.h>

#include "../checks.h"
#include "../layout.h"
#include "../signatures.h"
#include "arguments.h"
#include "backward.h"
#include "forward_into.h"
#include "parallel.h"

namespace mha_ext::cpu {

std::tuple<at::Tensor, at::Tensor> attention_with_weights_into(const AttentionArguments& args, bool average,
                                                               const OutputTargets& targets) {
  BoundArguments bound = bind(args);
  kernels::AttentionParams& p = bound.params;
  const at::ScalarType type = compute_type(args.query);
  const at::Tensor lse = at::empty({p.batch, p.heads, p.num_queries}, args.query.options().dtype(type));
  const at::Tensor weights = average ? at::empty({p.batch, p.num_queries, p.num_keys}, args.query.options())
                                     : at::empty({p.batch, p.heads, p.num_queries, p.num_keys}, args.query.options());
  if (lse.numel() == 0) return {lse, weights};

  const kernels::KernelTable& kernel = kernels_for(args);
  const int64_t head_count = average ? p.heads : 1, first_heads = p.heads / head_count;
  p.query_block = query_block_size(p.num_queries, kernel.vector_width,
                                   most_weights_queries(p.num_queries, p.num_keys, p.batch * first_heads));
  kernels::ForwardParams forward = bind_outputs(bound, targets);
  forward.lse = lse.mutable_data_ptr();
  const kernels::WeightsParams w{forward, mutable_view_of(average ? weights.unsqueeze(1) : weights), head_count,
                                 1.0 / static_cast<double>(head_count)};
  const int64_t blocks = divide_up(p.num_queries, p.query_block);
  const double multiply_adds = static_cast<double>(p.query_block) * static_cast<double>(p.num_keys) *
                               static_cast<double>((p.head_dim + p.value_dim) * head_count);
  parallel_units(p.batch * first_heads * blocks, multiply_adds, kernel.weights_scratch_bytes(w),
                 [&](int64_t unit, void* scratch) {
                   const int64_t row = unit / blocks;
                   // Last block first: under a causal mask it is the longest.
                   const int64_t begin = (blocks - 1 - unit % blocks) * p.query_block;
                   const int64_t count = std::min(p.query_block, p.num_queries - begin);
                   kernel.weights_block(w, {row / first_heads, row % first_heads, begin, count}, scratch);
                 });
  return {lse, weights};
}

namespace {

WeightsResult attention_with_weights(const AttentionArguments& args, bool average) {
  check_attention("attention_with_weights", args);
  const at::Tensor out = empty_like_query(args.query, args.value.size(3));
  const auto [lse, weights] = attention_with_weights_into(args, average, {out});
  return {out, lse, weights};
}

WeightsGradients attention_weights_backward(const AttentionArguments& args, const WeightsCotangents& cotangents) {
  check_attention_weights_backward(args, cotangents);
  const BoundArguments bound = bind(args);
  const at::Tensor lse = cotangents.lse.contiguous();
  const at::Tensor& grad = cotangents.grad_weights;
  const at::Tensor per_head = cotangents.average ? grad.unsqueeze(1) : grad;
  kernels::BackwardParams b;
  b.attention = bound.params;
  b.lse = lse.const_data_ptr();
  b.grad_weights = view_of(per_head);
  if (cotangents.average) {
    b.grad_weights.stride_h = 0;
    b.weights_factor = 1.0 / static_cast<double>(b.attention.heads);
  }
  const auto& wanted = cotangents.output_mask;
  const auto [query, key, value, attn_mask, padding, bias, sink] =
      run_backward(b, args, bound, {wanted[0], wanted[1], false, wanted[2], wanted[3], wanted[4], wanted[5]});
  return {query, key, attn_mask, padding, bias, sink};
}

}  // namespace

TORCH_LIBRARY_IMPL(mha_ext, CPU, m) {
  m.impl("attention_with_weights", &attention_with_weights_kernel<attention_with_weights>);
  m.impl("attention_weights_backward", &attention_weights_backward_kernel<attention_weights_backward>);
}

}  // namespace mha_ext::cpu
