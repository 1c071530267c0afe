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
  at::Tensor cap_slope;  // d(capped score) / d(score), 0 at hidden pairs; undefined without a softcap
  at::Tensor sink;       // undefined without
  Softmax softmax;
  at::Tensor multipliers;  // of dropout, undefined without
};

Problem make_problem(const AttentionArguments& arguments, const HeadRange& heads);
HeadRange all_heads(const AttentionArguments& arguments);

// Dropout applied, to probabilities or to their gradient.
at::Tensor dropped(const at::Tensor& pairs, const Problem& problem);

// dS = P (dP - rowsum(P dP) + dlse), 0 at hidden pairs. `grad_weights` is that of the probabilities after dropout;
// what it holds at hidden pairs has no influence. Undefined gradients count as zero.
struct ScoreGradient {
  at::Tensor scores;  // dS
  at::Tensor delta;   // rowsum(P dP) - dlse, (B, H, T_q, 1)
};
ScoreGradient score_gradient(const Problem& problem, const at::Tensor& grad_weights, const at::Tensor& grad_lse);

// The sink's own dS, summed over the rows that it is in.
at::Tensor sink_gradient(const Problem& problem, const at::Tensor& delta);

// From dS to what the scores were made of, each in its own shape, in the computing dtype; wanted in their order.
struct InputGradients {
  at::Tensor query;
  at::Tensor key;
  at::Tensor attn_mask;
  at::Tensor key_padding_mask;
  at::Tensor relative_bias;
};
InputGradients input_gradients(const AttentionArguments& arguments, const Problem& problem,
                               const at::Tensor& grad_scores, const std::array<bool, 5>& wanted);

// A (B, H, T, X) result in the dtype of `like`, lying as (B, T, H, X); undefined stays undefined.
at::Tensor finish(const at::Tensor& tensor, const at::Tensor& like);
// A mask's gradient in the mask's dtype.
at::Tensor finish_mask(const at::Tensor& tensor, const at::Tensor& mask);

}  // namespace mha_ext::pairs
