// Backward of attention on CPU, recomputing the probabilities tile by tile, in memory linear in T.
#include <ATen/TensorOperators.h>
#include <ATen/ops/zeros_like.h>
#include <torch/library.h>

#include "../checks.h"
#include "../signatures.h"
#include "arguments.h"
#include "backward.h"

namespace mha_ext::cpu {

namespace {

// -sum P_sink (rowsum(dO O) - dlse) over the rows that the sink is in: its value is 0.
at::Tensor sink_gradient(const AttentionArguments& args, const AttentionCotangents& c, const at::Tensor& grad_lse) {
  const at::Tensor& sink = args.variants.sink;
  const at::ScalarType type = c.lse.scalar_type();
  at::Tensor delta;
  if (c.grad_out.defined()) {
    at::Tensor out = c.out.to(type);
    if (c.rounding.defined() && c.rounding.dim() == 4) out = out + c.rounding;
    delta = (c.grad_out.to(type) * out).sum(-1);
  }
  if (grad_lse.defined()) delta = delta.defined() ? delta - grad_lse : -grad_lse;
  if (!delta.defined()) return at::zeros_like(sink);
  return -(sink_share(sink_in(args, type), c.lse) * delta).sum(sink_rows(sink)).to(sink.scalar_type());
}

}  // namespace

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
  std::array<bool, kNumGradients> wanted = cotangents.output_mask;
  wanted[6] = false;  // the sink's is cheaper from what is known here
  AttentionGradients gradients = run_backward(b, args, bound, wanted, targets);
  if (cotangents.output_mask[6]) std::get<6>(gradients) = sink_gradient(args, cotangents, grad_lse);
  return gradients;
}

namespace {

AttentionGradients attention_backward(const AttentionArguments& args, const AttentionCotangents& cotangents) {
  check_attention_backward(args, cotangents);
  return attention_backward_into(args, cotangents, {});
}

}  // namespace

TORCH_LIBRARY_IMPL(mha_ext, CPU, m) { m.impl("attention_backward", &attention_backward_kernel<attention_backward>); }

}  // namespace mha_ext::cpu
