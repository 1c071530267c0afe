// Backward of the attention weights.
#include <ATen/TensorOperators.h>
#include <ATen/ops/cat.h>
#include <torch/library.h>

#include <vector>

#include "checks.h"
#include "composite.h"
#include "problem.h"
#include "signatures.h"

namespace mha_ext {
namespace {

using pairs::Problem;

// The problem of head h alone, as tensors with one head.
AttentionArguments select_head(const AttentionArguments& a, int64_t h) {
  AttentionArguments one = a;
  const c10::SymInt group = a.query.sym_size(1) / a.key.sym_size(1);
  one.query = a.query.narrow(1, h, 1);
  one.key = a.key.narrow_symint(1, c10::SymInt(h) / group, 1);
  for (at::Tensor* mask : {&one.attn_mask, &one.variants.relative_bias}) {
    if (mask->defined() && mask->sym_size(1) != 1) *mask = mask->narrow(1, h, 1);
  }
  if (a.variants.sink.defined()) one.variants.sink = a.variants.sink.narrow(-1, h, 1);
  return one;
}

int64_t num_heads(const AttentionArguments& a) { return a.query.sym_size(1).guard_int(__FILE__, __LINE__); }

// A sum, or a list to be put side by side, that grows head by head.
class PerHead {
 public:
  explicit PerHead(bool adds) : adds_(adds) {}

  void push(const at::Tensor& tensor) {
    if (!tensor.defined()) return;
    if (adds_ && !parts_.empty()) {
      parts_.front() = parts_.front() + tensor;
    } else {
      parts_.push_back(tensor);
    }
  }

  at::Tensor result(int64_t dim = 1) const {
    if (parts_.empty()) return {};
    return parts_.size() == 1 ? parts_.front() : at::cat(parts_, dim);
  }

 private:
  bool adds_;
  std::vector<at::Tensor> parts_;
};

}  // namespace

WeightsGradients attention_weights_backward_math(const AttentionArguments& a, const WeightsCotangents& c) {
  check_attention_weights_backward(a, c);
  const c10::impl::ExcludeDispatchKeyGuard no_autocast(c10::autocast_dispatch_keyset);
  const int64_t heads = num_heads(a);
  const int64_t group = heads / a.key.sym_size(1).guard_int(__FILE__, __LINE__);
  at::Tensor grad = c.grad_weights.to(pairs::compute_dtype(a.query));
  if (c.average) grad = grad.unsqueeze(1) / heads;
  const at::Tensor& bias = a.variants.relative_bias;
  const auto is_shared = [](const at::Tensor& mask) { return mask.defined() && mask.sym_size(1) == 1; };
  PerHead grad_query(false), grad_key(false), grad_mask(is_shared(a.attn_mask)), grad_padding(true), grad_group(true);
  PerHead grad_bias(is_shared(bias)), grad_sink(false);
  for (int64_t h = 0; h < heads; ++h) {
    const AttentionArguments one = select_head(a, h);
    pairs::Part part = pairs::whole_of(a);
    part.first_head = h;
    const Problem p = pairs::make_problem(one, part);
    const pairs::ScoreGradient score = pairs::score_gradient(p, c.average ? grad : grad.narrow(1, h, 1), {});
    const auto& wanted = c.output_mask;
    const pairs::MaskGradients g = pairs::mask_gradients(one, score.scores, {wanted[2], wanted[3], wanted[4]});
    const at::Tensor grad_products = pairs::uncapped_gradient(p, score.scores);
    if (wanted[5]) grad_sink.push(pairs::sink_gradient(p, score.delta));
    if (wanted[0]) grad_query.push(pairs::query_gradient(one, grad_products, p.key.values) * pairs::scale_of(a));
    grad_mask.push(g.attn_mask);
    grad_padding.push(g.key_padding_mask);
    grad_bias.push(g.relative_bias);
    if (wanted[1]) grad_group.push(pairs::key_gradient(one, grad_products, p.query.values));
    if ((h + 1) % group == 0) {
      grad_key.push(grad_group.result());
      grad_group = PerHead(true);
    }
  }
  return {pairs::finish(grad_query.result(), a.query),
          pairs::finish(grad_key.result(), a.key),
          pairs::finish_mask(grad_mask.result(), a.attn_mask),
          pairs::finish_mask(grad_padding.result(), a.key_padding_mask),
          pairs::finish_mask(grad_bias.result(), bias),
          pairs::finish_mask(grad_sink.result(-1), a.variants.sink)};
}

TORCH_LIBRARY_IMPL(mha_ext, CompositeExplicitAutograd, m) {
  m.impl("attention_weights_backward", TORCH_FN(attention_weights_backward_kernel<attention_weights_backward_math>));
}

}  // namespace mha_ext
