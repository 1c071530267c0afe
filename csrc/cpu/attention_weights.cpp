// The attention weights on CPU, per head or their mean over heads without a matrix a head, and their backward.
#include <ATen/ops/empty.h>
#include <torch/library.h>

#include "../checks.h"
#include "../signatures.h"
#include "arguments.h"
#include "backward.h"
#include "parallel.h"

namespace mha_ext::cpu {
namespace {

at::Tensor attention_weights(const AttentionArguments& args, const at::Tensor& lse, bool average) {
  check_attention_weights(args, lse);
  const BoundArguments bound = bind(args);
  const kernels::AttentionParams& p = bound.params;
  const at::Tensor out = average ? at::empty({p.batch, p.num_queries, p.num_keys}, args.query.options())
                                 : at::empty({p.batch, p.heads, p.num_queries, p.num_keys}, args.query.options());
  if (out.numel() == 0) return out;

  const at::Tensor lse_rows = lse.contiguous();
  kernels::WeightsParams w{p, lse_rows.const_data_ptr(), mutable_view_of(average ? out.unsqueeze(1) : out)};
  if (average) {
    w.head_count = p.heads;
    w.factor = 1.0 / static_cast<double>(p.heads);
  }
  const kernels::KernelTable& kernel = kernels_for(compute_type(args.query));
  const int64_t blocks = divide_up(p.num_queries, p.query_block), first_heads = p.heads / w.head_count;
  const double multiply_adds = static_cast<double>(p.query_block) * static_cast<double>(p.num_keys) *
                               static_cast<double>(p.head_dim * w.head_count);
  parallel_units(p.batch * first_heads * blocks, multiply_adds, kernel.weights_scratch_bytes(p),
                 [&](int64_t unit, void* scratch) {
                   const int64_t row = unit / blocks, begin = unit % blocks * p.query_block;
                   const int64_t count = std::min(p.query_block, p.num_queries - begin);
                   kernel.weights_block(w, {row / first_heads, row % first_heads, begin, count}, scratch);
                 });
  return out;
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
  const auto [query, key, value, attn_mask, padding] =
      run_backward(b, args, bound, {wanted[0], wanted[1], false, wanted[2], wanted[3]});
  return {query, key, attn_mask, padding};
}

}  // namespace

TORCH_LIBRARY_IMPL(mha_ext, CPU, m) {
  m.impl("attention_weights", &attention_weights_kernel<attention_weights>);
  m.impl("attention_weights_backward", &attention_weights_backward_kernel<attention_weights_backward>);
}

}  // namespace mha_ext::cpu
