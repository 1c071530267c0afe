// Backward of attention on CPU, recomputing the probabilities tile by tile, in memory linear in T.
#include <torch/library.h>

#include "../checks.h"
#include "../signatures.h"
#include "arguments.h"
#include "backward.h"

namespace mha_ext::cpu {

AttentionGradients attention_backward_into(const AttentionArguments& args, const AttentionCotangents& cotangents,
                                           const GradientTargets& targets) {
  const BoundArguments bound = bind(args);
  const at::Tensor lse = cotangents.lse.contiguous();
  at::Tensor grad_lse;
  kernels::BackwardParams b;
  b.attention = bound.params;
  b.lse = lse.const_data_ptr();
  if (cotangents.grad_out.defined()) {
    b.out = view_of(cotangents.out);
    b.grad_out = view_of(cotangents.grad_out);
    if (cotangents.rounding.defined() && cotangents.rounding.dim() == 4) b.rounding = view_of(cotangents.rounding);
  }
  if (cotangents.grad_lse.defined()) {
    grad_lse = cotangents.grad_lse.to(lse.scalar_type()).contiguous();
    b.grad_lse = grad_lse.const_data_ptr();
  }
  return run_backward(b, args, bound, cotangents.output_mask, targets);
}

namespace {

AttentionGradients attention_backward(const AttentionArguments& args, const AttentionCotangents& cotangents) {
  check_attention_backward(args, cotangents);
  return attention_backward_into(args, cotangents, {});
}

}  // namespace

TORCH_LIBRARY_IMPL(mha_ext, CPU, m) { m.impl("attention_backward", &attention_backward_kernel<attention_backward>); }

}  // namespace mha_ext::cpu
