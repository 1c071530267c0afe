#include "tangents.h"

#include <ATen/TensorOperators.h>

namespace mha_ext::pairs {
namespace {

at::Tensor sum_of(const at::Tensor& a, const at::Tensor& b) { return !a.defined() ? b : !b.defined() ? a : a + b; }

at::Tensor times(const at::Tensor& a, const at::Tensor& b) { return a.defined() && b.defined() ? a * b : at::Tensor(); }

// Undefined where a factor is.
at::Tensor product_of(const Operand& rows, const Operand& columns) {
  return rows.values.defined() && columns.values.defined() ? pair_product(rows, columns) : at::Tensor();
}

at::Tensor without_hidden(const at::Tensor& pairs, const Problem& p) {
  return pairs.defined() && p.hidden.defined() ? pairs.masked_fill(p.hidden, 0) : pairs;
}

Operand operand_of(const at::Tensor& tangent, const Problem& p, const AttentionArguments& a) {
  return tangent.defined() ? make_operand(tangent.to(compute_dtype(a.query)), p.hidden) : Operand{};
}

// A column beside the pairs, (B, H, T_q, 1).
at::Tensor sink_column(const Problem& p) { return sink_share(p.sink, p.softmax.lse).unsqueeze(-1); }

at::Tensor sink_tangent(const AttentionArguments& a, const Tangents& tangents) {
  return tangents[6].to(compute_dtype(a.query)).unsqueeze(-1).unsqueeze(-1);
}

// Both gradients of the scores and what moves them: dS = P G and its tangent, for G = dP - delta.
struct MovedScores {
  at::Tensor scores, moved;  // undefined where zero
  at::Tensor delta, moved_delta;
  Operand grad_out, moved_grad_out;
};

MovedScores move_scores(const AttentionArguments& a, const Problem& p, const Motion& m, const BackwardTangents& t) {
  MovedScores s;
  s.grad_out = operand_of(t.cotangents.grad_out, p, a), s.moved_grad_out = operand_of(t.grad_out, p, a);
  const ScoreGradient g = score_gradient(p, product_of(s.grad_out, p.value), t.cotangents.grad_lse);
  const at::Tensor moved_grad =
      without_hidden(sum_of(product_of(s.moved_grad_out, p.value), product_of(s.grad_out, m.value)), p);
  const at::Tensor moved_dropped = moved_grad.defined() ? dropped(moved_grad, p) : at::Tensor();
  const at::Tensor moved_pairs =
      sum_of(times(m.probabilities, g.probabilities), times(p.softmax.probabilities, moved_dropped));
  s.scores = g.scores, s.delta = g.delta;
  s.moved_delta = moved_pairs.defined() ? moved_pairs.sum(-1, /*keepdim=*/true) : s.delta * 0;
  if (t.grad_lse.defined()) s.moved_delta = s.moved_delta - t.grad_lse.unsqueeze(-1);
  const at::Tensor centred = g.probabilities.defined() ? g.probabilities - g.delta : -g.delta;
  const at::Tensor moved_centred = moved_dropped.defined() ? moved_dropped - s.moved_delta : -s.moved_delta;
  s.moved = without_hidden(m.probabilities * centred + p.softmax.probabilities * moved_centred, p);
  return s;
}

// The tangent of dS where products were capped: the slope moves too, by -2 capped / softcap^2 times capped's tangent.
at::Tensor moved_products(const AttentionArguments& a, const Problem& p, const Motion& m, const MovedScores& s) {
  if (!p.cap_slope.defined()) return s.moved;
  const double cap = softcap_of(a);
  const at::Tensor moved = s.moved * p.cap_slope;
  if (!m.products.defined()) return moved;
  return moved + s.scores * p.cap_slope * (m.products / cap) * (without_hidden(p.capped, p) / cap) * -2;
}

}  // namespace

Motion move(const AttentionArguments& a, const Problem& p, const Tangents& tangents) {
  Motion m;
  m.query =
      operand_of(tangents[0].defined() ? tangents[0].to(compute_dtype(a.query)) * scale_of(a) : tangents[0], p, a);
  m.key = operand_of(tangents[1], p, a);
  m.value = operand_of(tangents[2], p, a);
  m.products = without_hidden(sum_of(product_of(m.query, p.key), product_of(p.query, m.key)), p);
  const at::Tensor capped = m.products.defined() ? uncapped_gradient(p, m.products) : m.products;
  const at::Tensor& probabilities = p.softmax.probabilities;
  at::Tensor scores = without_hidden(sum_of(capped, mask_tangent(a, tangents)), p);
  if (!scores.defined()) scores = probabilities * 0;
  m.lse = (probabilities * scores).sum(-1, /*keepdim=*/true);
  if (tangents[6].defined()) m.lse = m.lse + sink_column(p) * sink_tangent(a, tangents);
  m.probabilities = without_hidden(probabilities * (scores - m.lse), p);
  return m;
}

AttentionResult moved_results(const AttentionArguments& a, const Problem& p, const Motion& m) {
  at::Tensor out = attend(a, p, dropped(m.probabilities, p), p.value);
  if (m.value.values.defined()) out = out + attend(a, p, dropped(p.softmax.probabilities, p), m.value);
  return {out, m.lse.squeeze(-1)};
}

std::array<at::Tensor, kNumGradients> moved_gradients(const AttentionArguments& a, const Problem& p, const Motion& m,
                                                      const BackwardTangents& t) {
  const MovedScores s = move_scores(a, p, m, t);
  const at::Tensor products = uncapped_gradient(p, s.scores), moved = moved_products(a, p, m, s);
  const auto& wanted = t.output_mask;
  std::array<at::Tensor, kNumGradients> result;
  if (wanted[0]) {
    result[0] = query_gradient(a, moved, p.key.values);
    if (m.key.values.defined()) result[0] = result[0] + query_gradient(a, products, m.key.values);
    result[0] = result[0] * scale_of(a);
  }
  if (wanted[1]) {
    result[1] = key_gradient(a, moved, p.query.values);
    if (m.query.values.defined()) result[1] = result[1] + key_gradient(a, products, m.query.values);
  }
  if (wanted[2]) {
    at::Tensor& grad = result[2];
    if (s.grad_out.values.defined()) grad = value_gradient(a, p, dropped(m.probabilities, p), s.grad_out);
    if (s.moved_grad_out.values.defined()) {
      grad = sum_of(grad, value_gradient(a, p, dropped(p.softmax.probabilities, p), s.moved_grad_out));
    }
    if (!grad.defined()) grad = p.value.values * 0;
  }
  const MaskGradients masks = mask_gradients(a, s.moved, {wanted[3], wanted[4], wanted[5]});
  result[3] = masks.attn_mask, result[4] = masks.key_padding_mask, result[5] = masks.relative_bias;
  if (wanted[6]) {
    const at::Tensor away = t.inputs[6].defined() ? sink_tangent(a, t.inputs) - m.lse : -m.lse;
    result[6] = -(sink_column(p) * (away * s.delta + s.moved_delta)).squeeze(-1).sum(sink_rows(p.sink));
  }
  return result;
}

}  // namespace mha_ext::pairs
