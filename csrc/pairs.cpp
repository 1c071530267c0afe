#include "pairs.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/amax.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/constant_pad_nd.h>
#include <ATen/ops/isfinite.h>
#include <ATen/ops/matmul.h>
#include <ATen/ops/zeros.h>
#include <c10/core/impl/TorchDispatchModeTLS.h>

#include <algorithm>
#include <cmath>
#include <limits>

namespace mha_ext::pairs {
namespace {

constexpr double kInf = std::numeric_limits<double>::infinity();
constexpr double kNaN = std::numeric_limits<double>::quiet_NaN();

at::Tensor nan_where(const at::Tensor& condition, const at::Tensor& like) {
  return at::zeros_symint(condition.sym_sizes(), like.options()).masked_fill(condition, kNaN);
}

// A mask over the keys it was made for, widened to all keys: appended keys get 0 (nothing added, nothing hidden).
at::Tensor over_all_keys(const at::Tensor& mask, const AttentionArguments& a) {
  if (a.num_appended_keys == 0) return mask;
  const c10::SymInt columns = a.key.sym_size(2) - a.num_appended_keys;
  return at::constant_pad_nd_symint(mask.expand_symint({-1, -1, -1, columns}), {0, a.num_appended_keys});
}

at::Tensor padding_as_pairs(const at::Tensor& key_padding_mask) { return key_padding_mask.unsqueeze(1).unsqueeze(1); }

c10::SymInt num_masked_keys(const AttentionArguments& a) { return a.key.sym_size(2) - a.num_appended_keys; }

at::Tensor columns_of(const AttentionArguments& a) {
  return at::arange(num_masked_keys(a), a.query.options().dtype(at::kLong));
}

at::Tensor rows_of(const AttentionArguments& a) {
  return at::arange(a.query.sym_size(2), a.query.options().dtype(at::kLong));
}

// True at pairs that the causal order or a window hides, (1, 1, T_q, keys); undefined when there is neither.
at::Tensor beyond_window(const AttentionArguments& a, const Part& part) {
  constexpr int64_t kFar = int64_t{1} << 40;  // beyond any sequence, and far from where sums overflow
  const int64_t left = std::min(a.variants.window_left, kFar), right = std::min(a.variants.window_right, kFar);
  const bool causal = a.causal == kUpperLeft || a.causal == kLowerRight;
  if (!causal && left == kNoLimit && right == kNoLimit) return {};
  const bool lower_right = a.causal == kLowerRight || a.causal == kLowerRightPositions;
  const c10::SymInt offset = part.first_query + (lower_right ? num_masked_keys(a) - part.queries : c10::SymInt(0));
  const at::Tensor distance = columns_of(a) - rows_of(a).unsqueeze(-1);
  at::Tensor hidden;
  if (causal || right != kNoLimit) hidden = distance.gt(offset + (causal ? 0 : right));
  if (left != kNoLimit) {
    const at::Tensor before = distance.lt(offset - left);
    hidden = hidden.defined() ? hidden.logical_or(before) : before;
  }
  return hidden.unsqueeze(0).unsqueeze(0);
}

at::Tensor outside_range(const AttentionArguments& a) {
  const at::Tensor bounds = a.variants.key_range.unsqueeze(2).unsqueeze(-1), columns = columns_of(a);
  return columns.lt(bounds.select(0, 0)).logical_or(columns.ge(bounds.select(0, 1)));
}

// Which entry of the relative bias a pair has: T_q - 1 + j - i, (T_q, keys).
at::Tensor bias_entries(const AttentionArguments& a) { return columns_of(a) + rows_of(a).flip(0).unsqueeze(-1); }

// The relative bias, or its tangent, as a mask over pairs.
at::Tensor bias_of_pairs(const AttentionArguments& a, const at::Tensor& bias) {
  const at::Tensor entries = bias_entries(a);
  return bias.index_select(-1, entries.flatten()).unflatten_symint(-1, entries.sym_sizes());
}

// Added to the scores. A float64 mask may hold finite numbers that float32 cannot: they stay finite, and visible.
at::Tensor add_mask(const at::Tensor& scores, const at::Tensor& mask, const AttentionArguments& a) {
  if (!mask.defined() || mask.scalar_type() == at::kBool) return scores;
  constexpr double kMax = std::numeric_limits<float>::max();
  const bool narrows = mask.scalar_type() == at::kDouble && scores.scalar_type() == at::kFloat;
  const at::Tensor bias = (narrows ? mask.clamp(-kMax, kMax) : mask).to(scores.scalar_type());
  return scores + over_all_keys(bias, a);
}

at::Tensor shift_right(const at::Tensor& x, int64_t bits) {
  return x.bitwise_right_shift(bits).bitwise_and((int64_t{1} << (64 - bits)) - 1);
}

constexpr int64_t as_signed(uint64_t constant) { return static_cast<int64_t>(constant); }

at::Tensor splitmix64(at::Tensor x) {
  x = x + as_signed(0x9E3779B97F4A7C15);
  x = x.bitwise_xor(shift_right(x, 30)) * as_signed(0xBF58476D1CE4E5B9);
  x = x.bitwise_xor(shift_right(x, 27)) * as_signed(0x94D049BB133111EB);
  return x.bitwise_xor(shift_right(x, 31));
}

at::Tensor low32(const at::Tensor& x) { return x.bitwise_and(int64_t{0xFFFFFFFF}); }

}  // namespace

at::ScalarType compute_dtype(const at::Tensor& tensor) {
  return tensor.scalar_type() == at::kDouble ? at::kDouble : at::kFloat;
}

double scale_of(const AttentionArguments& a) {
  return a.scale.has_value() ? *a.scale
                             : 1.0 / std::sqrt(static_cast<double>(a.query.sym_size(3).guard_int(__FILE__, __LINE__)));
}

bool has_readable_values(const at::Tensor& tensor) {
  constexpr c10::DispatchKeySet kWrapped({c10::DispatchKey::Python, c10::DispatchKey::FuncTorchBatched,
                                          c10::DispatchKey::FuncTorchGradWrapper, c10::DispatchKey::Functionalize});
  return !tensor.is_meta() && !tensor.key_set().has_any(kWrapped) && !c10::impl::TorchDispatchModeTLS::any_modes_set();
}

Part whole_of(const AttentionArguments& a) { return {a.query.sym_size(0), a.query.sym_size(1), a.query.sym_size(2)}; }

at::Tensor hidden_pairs(const AttentionArguments& a, const Part& part) {
  at::Tensor hidden;
  const auto hide = [&](const at::Tensor& pairs) {
    const at::Tensor all = over_all_keys(pairs, a);
    hidden = hidden.defined() ? hidden.logical_or(all) : all;
  };
  if (a.attn_mask.defined()) {
    hide(a.attn_mask.scalar_type() == at::kBool ? a.attn_mask.logical_not() : a.attn_mask.eq(-kInf));
  }
  if (a.key_padding_mask.defined()) {
    const at::Tensor mask = padding_as_pairs(a.key_padding_mask);
    hide(mask.scalar_type() == at::kBool ? mask : mask.eq(-kInf));
  }
  if (a.variants.relative_bias.defined()) hide(bias_of_pairs(a, a.variants.relative_bias).eq(-kInf));
  const at::Tensor beyond = beyond_window(a, part);
  if (beyond.defined()) hide(beyond);
  if (a.variants.key_range.defined()) hide(outside_range(a));
  return hidden;
}

Operand make_operand(const at::Tensor& tensor, const at::Tensor& hidden) {
  if (!hidden.defined()) return {tensor, {}};
  const at::Tensor bad = at::isfinite(tensor.detach()).logical_not();
  if (has_readable_values(bad) && !bad.any().item<bool>()) return {tensor, {}};
  return {tensor.masked_fill(bad, 0), bad};
}

at::Tensor fold(const at::Tensor& tensor, const c10::SymInt& kv_heads) {
  return tensor.unflatten_symint(1, {kv_heads, tensor.sym_size(1) / kv_heads}).flatten(2, 3);
}

at::Tensor unfold(const at::Tensor& folded, const c10::SymInt& heads) {
  const c10::SymInt group = heads / folded.sym_size(1);
  return folded.unflatten_symint(2, {group, folded.sym_size(2) / group}).flatten(1, 2);
}

at::Tensor pair_product(const Operand& rows, const Operand& columns) {
  const c10::SymInt kv_heads = columns.values.sym_size(1);
  const c10::SymInt heads = rows.values.sym_size(1);
  at::Tensor product = unfold(at::matmul(fold(rows.values, kv_heads), columns.values.transpose(2, 3)), heads);
  if (rows.bad.defined()) product = product + nan_where(rows.bad.any(-1, /*keepdim=*/true), product);
  if (columns.bad.defined()) {
    const at::Tensor marks = nan_where(columns.bad.any(-1), product).unsqueeze(2);
    product = product + marks.repeat_interleave_symint(heads / kv_heads, 1);
  }
  return product;
}

at::Tensor weighted_sum(const at::Tensor& weights, const Operand& x, const at::Tensor& visible) {
  const at::Tensor sum = at::matmul(weights, x.values);
  if (!x.bad.defined()) return sum;
  const at::Tensor meets_bad = at::matmul(visible.to(sum.scalar_type()), x.bad.to(sum.scalar_type())).gt(0);
  // Through the weights, so that their gradient is NaN as well.
  return sum + weights.sum(-1, /*keepdim=*/true) * nan_where(meets_bad, sum);
}

at::Tensor mask_tangent(const AttentionArguments& a, const Tangents& tangents) {
  at::Tensor sum;
  const auto add = [&](const at::Tensor& pairs) {
    const at::Tensor all = over_all_keys(pairs.to(compute_dtype(a.query)), a);
    sum = sum.defined() ? sum + all : all;
  };
  if (tangents[3].defined()) add(tangents[3]);
  if (tangents[4].defined()) add(padding_as_pairs(tangents[4]));
  if (tangents[5].defined()) add(bias_of_pairs(a, tangents[5]));
  return sum;
}

at::Tensor bias_gradient(const AttentionArguments& a, const at::Tensor& grad_scores) {
  const at::Tensor& bias = a.variants.relative_bias;
  const at::Tensor entries = bias_entries(a);
  const std::array<c10::SymInt, 3> shape{grad_scores.sym_size(0), grad_scores.sym_size(1), bias.sym_size(2)};
  const at::Tensor sums = at::zeros_symint(shape, grad_scores.options());
  return sums.index_add(-1, entries.flatten(), grad_scores.flatten(2)).sum_to_size_symint(bias.sym_sizes());
}

at::Tensor capped(const AttentionArguments& a, const at::Tensor& scores) {
  const double cap = softcap_of(a);
  return cap > 0 ? (scores / cap).tanh() * cap : scores;
}

at::Tensor masked_scores(const AttentionArguments& a, const at::Tensor& products, const at::Tensor& hidden) {
  at::Tensor scores = add_mask(products, a.attn_mask, a);
  if (a.variants.relative_bias.defined()) scores = add_mask(scores, bias_of_pairs(a, a.variants.relative_bias), a);
  if (a.key_padding_mask.defined()) scores = add_mask(scores, padding_as_pairs(a.key_padding_mask), a);
  return hidden.defined() ? scores.masked_fill(hidden, -kInf) : scores;
}

Softmax softmax(const at::Tensor& scores, const at::Tensor& hidden, const at::Tensor& sink) {
  const at::Tensor logit = sink.defined() ? sink.unsqueeze(-1).unsqueeze(-1) : sink;
  if (scores.sym_size(-1) == 0) {
    const at::Tensor zeros = scores.sum(-1);
    return {scores, sink.defined() ? zeros + sink.unsqueeze(-1) : zeros - kInf};
  }
  // The maximum only guards against overflow; the result does not depend on it, so neither does the derivative.
  at::Tensor row_max = scores.detach().amax(-1, /*keepdim=*/true);
  if (sink.defined()) row_max = row_max.maximum(logit.detach());
  const at::Tensor shift = row_max.masked_fill(row_max.eq(-kInf), 0);
  const at::Tensor exponentials = (scores - shift).exp();
  at::Tensor sum = exponentials.sum(-1, /*keepdim=*/true);
  if (sink.defined()) sum = sum + (logit - shift).exp();
  const at::Tensor empty = sum.eq(0);
  const at::Tensor divisor = sum.masked_fill(empty, 1);
  at::Tensor probabilities = exponentials / divisor;
  // In a row that sees a NaN the hidden pairs got NaN too.
  if (hidden.defined()) probabilities = probabilities.masked_fill(hidden, 0);
  return {probabilities, (shift + divisor.log()).masked_fill(empty, -kInf).squeeze(-1)};
}

at::Tensor dropout_multipliers(const AttentionArguments& a, const Part& part) {
  const auto options = a.query.options().dtype(at::kLong);
  at::Tensor b = at::arange(a.query.sym_size(0), options) + part.first_sample, seed = a.dropout_seed.reshape({-1});
  if (a.dropout_seed.sym_numel() != 1) {
    const at::Scalar samples_per_seed(part.samples / a.dropout_seed.sym_numel());
    seed = seed.index_select(0, b.floor_divide(samples_per_seed));
    b = b.remainder(samples_per_seed);
  }
  const at::Tensor h = at::arange(a.query.sym_size(1), options) + part.first_head;
  const at::Tensor i = at::arange(a.query.sym_size(2), options).unsqueeze(-1) + part.first_query;
  const at::Tensor j = at::arange(a.key.sym_size(2), options);
  const at::Tensor place = b.unsqueeze(-1) * at::Scalar(part.heads) + h;
  const at::Tensor key = splitmix64(splitmix64(seed).unsqueeze(-1).bitwise_xor(place));
  const at::Tensor row = splitmix64(key.unsqueeze(-1).unsqueeze(-1) + j);  // (B, H, 1, T_kv)
  at::Tensor x = i.bitwise_xor(low32(row));
  x = low32(x.bitwise_xor(shift_right(x, 16)) * int64_t{0x7feb352d});
  x = low32(x.bitwise_xor(shift_right(x, 15)) + shift_right(row, 32));
  x = low32(x * int64_t{0x846ca68b});
  x = low32(x.bitwise_xor(shift_right(x, 16)) * int64_t{0x9E3779B1});
  x = x.bitwise_xor(shift_right(x, 15));
  const at::Tensor keep = x.ge(static_cast<int64_t>(dropout_threshold(a.dropout_p)));
  return keep.to(compute_dtype(a.query)) * (1.0 / (1.0 - a.dropout_p));
}

}  // namespace mha_ext::pairs
