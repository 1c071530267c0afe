#include "problem.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/matmul.h>
#include <ATen/ops/rsub.h>

namespace mha_ext::pairs {

Problem make_problem(const AttentionArguments& a) { return make_problem(a, whole_of(a)); }

Problem make_problem(const AttentionArguments& a, const Part& part) {
  const at::ScalarType dtype = compute_dtype(a.query);
  Problem p;
  p.hidden = hidden_pairs(a, part);
  p.query = make_operand(a.query.to(dtype) * scale_of(a), p.hidden);
  p.key = make_operand(a.key.to(dtype), p.hidden);
  if (a.value.defined()) p.value = make_operand(a.value.to(dtype), p.hidden);
  at::Tensor products = pair_product(p.query, p.key);
  // NaN of hidden pairs would come back through the cap's second derivative.
  if (a.variants.softcap > 0 && p.hidden.defined()) products = products.masked_fill(p.hidden, 0);
  const at::Tensor scores = capped(a, products);
  if (const double cap = softcap_of(a); cap > 0) {
    p.capped = scores;
    const at::Tensor slope = at::rsub((scores / cap).square(), 1);  // 1 - x fills in place: ONNX export refuses
    p.cap_slope = p.hidden.defined() ? slope.masked_fill(p.hidden, 0) : slope;
  }
  if (a.variants.sink.defined()) p.sink = sink_in(a, dtype);
  p.softmax = softmax(masked_scores(a, scores, p.hidden), p.hidden, p.sink);
  if (a.dropout_seed.defined()) p.multipliers = dropout_multipliers(a, part);
  return p;
}

at::Tensor dropped(const at::Tensor& pairs, const Problem& p) {
  return p.multipliers.defined() ? pairs * p.multipliers : pairs;
}

ScoreGradient score_gradient(const Problem& p, const at::Tensor& grad_weights, const at::Tensor& grad_lse) {
  const at::Tensor& probabilities = p.softmax.probabilities;
  ScoreGradient gradient;
  if (grad_weights.defined()) {
    const at::Tensor visible = p.hidden.defined() ? grad_weights.masked_fill(p.hidden, 0) : grad_weights;
    gradient.probabilities = dropped(visible, p);
    gradient.delta = (probabilities * gradient.probabilities).sum(-1, /*keepdim=*/true);
    if (grad_lse.defined()) gradient.delta = gradient.delta - grad_lse.unsqueeze(-1);
    gradient.scores = probabilities * (gradient.probabilities - gradient.delta);
  } else if (grad_lse.defined()) {
    gradient.delta = -grad_lse.unsqueeze(-1);
    gradient.scores = probabilities * grad_lse.unsqueeze(-1);
  } else {
    gradient.delta = p.softmax.lse.unsqueeze(-1) * 0;
    gradient.scores = probabilities * 0;
  }
  if (p.hidden.defined()) gradient.scores = gradient.scores.masked_fill(p.hidden, 0);
  return gradient;
}

at::Tensor sink_gradient(const Problem& p, const at::Tensor& delta) {
  return -(sink_share(p.sink, p.softmax.lse) * delta.squeeze(-1)).sum(sink_rows(p.sink));
}

MaskGradients mask_gradients(const AttentionArguments& a, const at::Tensor& grad_scores,
                             const std::array<bool, 3>& wanted) {
  MaskGradients gradients;
  const at::Tensor masked = grad_scores.narrow_symint(-1, 0, a.key.sym_size(2) - a.num_appended_keys);
  if (wanted[0]) gradients.attn_mask = masked.sum_to_size_symint(a.attn_mask.sym_sizes());
  if (wanted[1]) {
    gradients.key_padding_mask = masked.sum({1, 2}).sum_to_size_symint(a.key_padding_mask.sym_sizes());
  }
  if (wanted[2]) gradients.relative_bias = bias_gradient(a, masked);
  return gradients;
}

at::Tensor uncapped_gradient(const Problem& p, const at::Tensor& grad_scores) {
  return p.cap_slope.defined() ? grad_scores * p.cap_slope : grad_scores;
}

// Where a query and a visible key meet a NaN, the row's probabilities and so its gradient are NaN already: plain
// products with the finite operands suffice.
at::Tensor query_gradient(const AttentionArguments& a, const at::Tensor& grad_products, const at::Tensor& key) {
  return unfold(at::matmul(fold(grad_products, a.key.sym_size(1)), key), a.query.sym_size(1));
}

at::Tensor key_gradient(const AttentionArguments& a, const at::Tensor& grad_products, const at::Tensor& query) {
  const c10::SymInt kv_heads = a.key.sym_size(1);
  return at::matmul(fold(grad_products, kv_heads).transpose(2, 3), fold(query, kv_heads));
}

at::Tensor folded_visible(const Problem& p, const c10::SymInt& kv_heads) {
  if (!p.hidden.defined()) return {};
  return fold(p.hidden.logical_not().expand_symint(p.softmax.probabilities.sym_sizes()), kv_heads);
}

at::Tensor attend(const AttentionArguments& a, const Problem& p, const at::Tensor& weights, const Operand& value) {
  const c10::SymInt kv_heads = a.key.sym_size(1);
  const at::Tensor visible = value.bad.defined() ? folded_visible(p, kv_heads) : at::Tensor();
  return unfold(weighted_sum(fold(weights, kv_heads), value, visible), a.query.sym_size(1));
}

at::Tensor value_gradient(const AttentionArguments& a, const Problem& p, const at::Tensor& weights,
                          const Operand& grad_out) {
  const c10::SymInt kv_heads = a.key.sym_size(1);
  Operand folded{fold(grad_out.values, kv_heads), {}};
  at::Tensor visible;
  if (grad_out.bad.defined()) {
    folded.bad = fold(grad_out.bad, kv_heads);
    visible = folded_visible(p, kv_heads).transpose(2, 3);
  }
  return weighted_sum(fold(weights, kv_heads).transpose(2, 3), folded, visible);
}

at::Tensor finish(const at::Tensor& tensor, const at::Tensor& like) {
  if (!tensor.defined()) return tensor;
  return tensor.to(like.scalar_type()).transpose(1, 2).contiguous().transpose(1, 2);
}

at::Tensor finish_mask(const at::Tensor& tensor, const at::Tensor& mask) {
  return tensor.defined() ? tensor.to(mask.scalar_type()).contiguous() : tensor;
}

AttentionGradients finish_all(const Tangents& gradients, const AttentionArguments& a) {
  return {finish(gradients[0], a.query),
          finish(gradients[1], a.key),
          finish(gradients[2], a.value),
          finish_mask(gradients[3], a.attn_mask),
          finish_mask(gradients[4], a.key_padding_mask),
          finish_mask(gradients[5], a.variants.relative_bias),
          finish_mask(gradients[6], a.variants.sink)};
}

}  // namespace mha_ext::pairs
