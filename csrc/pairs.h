// What attention does to (query, key) pairs, in ATen operators: visibility, scores, softmax, dropout. Differentiable
// any number of times, in reverse and in forward mode, and under vmap; sizes may be symbolic. Quadratic in memory.
//
// Pair tensors are (B, H, T_q, T_kv). "Folded" means (B, H_kv, G * T_q, .), G = H / H_kv: the query heads that share a
// key/value head lie one below the other, so that one batched product serves them all and sums over them.
//
// A hidden pair has no influence, whatever is stored behind it. 0 * NaN is NaN, so products over pairs never see a
// non-finite operand where pairs may be hidden: it is set to 0, and NaN is put back where a visible pair meets it.
#pragma once

#include <ATen/core/Tensor.h>

#include "attention.h"

namespace mha_ext::pairs {

// Where a part of a problem begins, and the sizes of the whole: dropout draws by the numbers of sample, head and query,
// and positions count from the first query.
struct Part {
  c10::SymInt samples, heads, queries;  // of the whole
  int64_t first_sample = 0, first_head = 0, first_query = 0;
};
Part whole_of(const AttentionArguments& arguments);

// float64 computes in float64, everything else in float32.
at::ScalarType compute_dtype(const at::Tensor& tensor);

// Whether a tensor's values can be looked at: not while it is traced, batched or without data.
bool has_readable_values(const at::Tensor& tensor);

// True at hidden pairs, broadcastable to (B, H, T_q, T_kv); undefined when every pair is visible.
at::Tensor hidden_pairs(const AttentionArguments& arguments, const Part& part);

// An operand of a product over pairs. `bad` marks what was not finite, and is undefined when all is (or may be) used.
struct Operand {
  at::Tensor values;
  at::Tensor bad;
};
Operand make_operand(const at::Tensor& tensor, const at::Tensor& hidden);

at::Tensor fold(const at::Tensor& tensor, const c10::SymInt& kv_heads);  // (B, H, T, X) -> (B, H_kv, G * T, X)
at::Tensor unfold(const at::Tensor& folded, const c10::SymInt& heads);   // and back

// rows columns^T for every pair: rows (B, H, T_q, X), columns (B, H_kv, T_kv, X). What hidden pairs get is undefined.
at::Tensor pair_product(const Operand& rows, const Operand& columns);

// weights x for folded weights (B, H_kv, M, N) that are 0 at hidden pairs; folded `visible` like weights, or undefined.
at::Tensor weighted_sum(const at::Tensor& weights, const Operand& x, const at::Tensor& visible);

// softcap tanh(scores / softcap), or the scores themselves.
at::Tensor capped(const AttentionArguments& arguments, const at::Tensor& scores);

// Capped scores + float masks and bias, -inf at hidden pairs.
at::Tensor masked_scores(const AttentionArguments& arguments, const at::Tensor& scores, const at::Tensor& hidden);

// How tangents of the float masks and of the bias move the scores; undefined without any.
at::Tensor mask_tangent(const AttentionArguments& arguments, const Tangents& tangents);

// The relative bias' gradient in its own shape from that of the scores over masked keys.
at::Tensor bias_gradient(const AttentionArguments& arguments, const at::Tensor& grad_scores);

// A query that sees no key has probabilities 0, and lse -inf unless there is a sink.
struct Softmax {
  at::Tensor probabilities;  // (B, H, T_q, T_kv)
  at::Tensor lse;            // (B, H, T_q)
};
Softmax softmax(const at::Tensor& scores, const at::Tensor& hidden, const at::Tensor& sink);

// 1 / (1 - p) at kept pairs, 0 at dropped ones: a hash of (seed, b, h, i, j), the CPU kernels' own (dropout.inl.h).
at::Tensor dropout_multipliers(const AttentionArguments& arguments, const Part& part);

double scale_of(const AttentionArguments& arguments);

}  // namespace mha_ext::pairs
