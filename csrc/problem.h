// One attention problem over pairs: the quantities that its forward and every closed-form derivative share.
#pragma once

#include "attention.h"
#include "pairs.h"

namespace mha_ext::pairs {

// Tensors in the computing dtype.
struct Problem {
  at::Tensor hidden;  // undefined when every pair is visible
  Operand query;      // scaled
  Operand key;
  Operand value;         // absent for the attention weights
  at::Tensor capped;     // the scores before masks are added; undefined without a softcap
  at::Tensor cap_slope;  // d(capped score) / d(score), 0 at hidden pairs; undefined without a softcap
  at::Tensor sink;       // undefined without
  Softmax softmax;
  at::Tensor multipliers;  // of dropout, undefined without
};

Problem make_problem(const AttentionArguments& arguments, const Part& part);
Problem make_problem(const AttentionArguments& arguments);  // the whole

// Dropout applied, to probabilities or to their gradient.
at::Tensor dropped(const at::Tensor& pairs, const Problem& problem);

// dS = P (dP - rowsum(P dP) + dlse), 0 at hidden pairs. `grad_weights` is that of the probabilities after dropout;
// what it holds at hidden pairs has no influence. Undefined gradients count as zero.
struct ScoreGradient {
  at::Tensor probabilities;  // dP, 0 at hidden pairs; undefined where it is zero
  at::Tensor scores;         // dS
  at::Tensor delta;          // rowsum(P dP) - dlse, (B, H, T_q, 1)
};
ScoreGradient score_gradient(const Problem& problem, const at::Tensor& grad_weights, const at::Tensor& grad_lse);

// The sink's own dS, summed over the rows that it is in.
at::Tensor sink_gradient(const Problem& problem, const at::Tensor& delta);

// From dS to what was added to the scores, each in its own shape, in the computing dtype; wanted in their order.
struct MaskGradients {
  at::Tensor attn_mask;
  at::Tensor key_padding_mask;
  at::Tensor relative_bias;
};
MaskGradients mask_gradients(const AttentionArguments& arguments, const at::Tensor& grad_scores,
                             const std::array<bool, 3>& wanted);

// dS of the products that were capped.
at::Tensor uncapped_gradient(const Problem& problem, const at::Tensor& grad_scores);

// From the gradient of pair products to that of their two factors; queries are given and wanted scaled.
at::Tensor query_gradient(const AttentionArguments& arguments, const at::Tensor& grad_products, const at::Tensor& key);
at::Tensor key_gradient(const AttentionArguments& arguments, const at::Tensor& grad_products, const at::Tensor& query);

// Folded, True where a pair is visible; undefined when none is hidden.
at::Tensor folded_visible(const Problem& problem, const c10::SymInt& kv_heads);

// O = W V for weights after dropout.
at::Tensor attend(const AttentionArguments& arguments, const Problem& problem, const at::Tensor& weights,
                  const Operand& value);

// dV = W^T dO.
at::Tensor value_gradient(const AttentionArguments& arguments, const Problem& problem, const at::Tensor& weights,
                          const Operand& grad_out);

// A (B, H, T, X) result in the dtype of `like`, lying as (B, T, H, X); undefined stays undefined.
at::Tensor finish(const at::Tensor& tensor, const at::Tensor& like);
// A mask's gradient in the mask's dtype.
at::Tensor finish_mask(const at::Tensor& tensor, const at::Tensor& mask);
// All gradients as their inputs are, in the operators' order.
AttentionGradients finish_all(const Tangents& gradients, const AttentionArguments& arguments);

}  // namespace mha_ext::pairs
