// How tangents of the inputs move what attention computes over pairs, and its gradients. Built on problem.h, so in ATen
// operators and differentiable.
#pragma once

#include "problem.h"

namespace mha_ext::pairs {

// Along the tangents, S by dS and so P by P (dS - dlse) with dlse = rowsum(P dS).
struct Motion {
  at::Tensor products;        // of the scores before they are capped and masked, 0 at hidden pairs; undefined if still
  at::Tensor probabilities;   // before dropout
  at::Tensor lse;             // (B, H, T_q, 1)
  Operand query, key, value;  // the tangents themselves, query's scaled; their values are undefined where there is none
};
Motion move(const AttentionArguments& arguments, const Problem& problem, const Tangents& tangents);

// Tangents of out and lse, in the computing dtype.
AttentionResult moved_results(const AttentionArguments& arguments, const Problem& problem, const Motion& motion);

// In the computing dtype: the tangents of the gradients, in the order of kNumGradients, each in its own shape.
std::array<at::Tensor, kNumGradients> moved_gradients(const AttentionArguments& arguments, const Problem& problem,
                                                      const Motion& motion, const BackwardTangents& tangents);

}  // namespace mha_ext::pairs
