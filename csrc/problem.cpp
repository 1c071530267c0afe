#include "problem.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/matmul.h>

namespace mha_ext::pairs {

Problem make_problem(const AttentionArguments& a, const HeadRange& heads) {
  const at::ScalarType dtype = compute_dtype(a.query);
  Problem p;
  p.hidden = hidden_pairs(a);
  p.query = make_operand(a.query.to(dtype) * scale_of(a), p.hidden);
  p.key = make_operand(a.key.to(dtype), p.hidden);
  if (a.value.defined()) p.value = make_operand(a.value.to(dtype), p.hidden);
  p.softmax = softmax(masked_scores(a, p.query, p.key, p.hidden), p.hidden);
  if (a.dropout_seed.defined()) p.multipliers = dropout_multipliers(a, heads);
  return p;
}

HeadRange all_heads(const AttentionArguments& a) { return {0, a.query.sym_size(1)}; }

at::Tensor dropped(const at::Tensor& pairs, const Problem& p) {
  return p.multipliers.defined() ? pairs * p.multipliers : pairs;
}

at::Tensor score_gradient(const Problem& p, const at::Tensor& grad_weights, const at::Tensor& grad_lse) {
  const at::Tensor& probabilities = p.softmax.probabilities;
  at::Tensor gradient;
  if (grad_weights.defined()) {
    const at::Tensor visible = p.hidden.defined() ? grad_weights.masked_fill(p.hidden, 0) : grad_weights;
    const at::Tensor grad_probabilities = dropped(visible, p);
    at::Tensor delta = (probabilities * grad_probabilities).sum(-1, /*keepdim=*/true);
    if (grad_lse.defined()) delta = delta - grad_lse.unsqueeze(-1);
    gradient = probabilities * (grad_probabilities - delta);
  } else if (grad_lse.defined()) {
    gradient = probabilities * grad_lse.unsqueeze(-1);
  } else {
    gradient = probabilities * 0;
  }
  return p.hidden.defined() ? gradient.masked_fill(p.hidden, 0) : gradient;
}

// Where a query and a visible key meet a NaN, the row's probabilities and so its gradient are NaN already: plain
// products with the finite operands suffice.
InputGradients input_gradients(const AttentionArguments& a, const Problem& p, const at::Tensor& grad_scores,
                               std::array<bool, 4> wanted) {
  InputGradients gradients;
  const c10::SymInt kv_heads = a.key.sym_size(1);
  const at::Tensor folded = fold(grad_scores, kv_heads);
  if (wanted[0]) {
    gradients.query = unfold(at::matmul(folded, p.key.values), a.query.sym_size(1)) * scale_of(a);
  }
  if (wanted[1]) gradients.key = at::matmul(folded.transpose(2, 3), fold(p.query.values, kv_heads));
  const at::Tensor masked = grad_scores.narrow_symint(-1, 0, a.key.sym_size(2) - a.num_appended_keys);
  if (wanted[2]) gradients.attn_mask = masked.sum_to_size_symint(a.attn_mask.sym_sizes());
  if (wanted[3]) {
    gradients.key_padding_mask = masked.sum({1, 2}).sum_to_size_symint(a.key_padding_mask.sym_sizes());
  }
  return gradients;
}

at::Tensor finish(const at::Tensor& tensor, const at::Tensor& like) {
  if (!tensor.defined()) return tensor;
  return tensor.to(like.scalar_type()).transpose(1, 2).contiguous().transpose(1, 2);
}

at::Tensor finish_mask(const at::Tensor& tensor, const at::Tensor& mask) {
  return tensor.defined() ? tensor.to(mask.scalar_type()).contiguous() : tensor;
}

}  // namespace mha_ext::pairs
