// Derivatives along tangents on CPU, in memory linear in T. Where an input is not finite, hidden pairs must be told
// from those that meet it: that is left to the composition.
#include <ATen/TensorOperators.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/zeros_like.h>
#include <torch/library.h>

#include <algorithm>
#include <cmath>
#include <vector>

#include "../checks.h"
#include "../composite.h"
#include "../layout.h"
#include "../signatures.h"
#include "arguments.h"
#include "backward.h"
#include "parallel.h"

namespace mha_ext::cpu {
namespace {

// A sum is finite when all its terms are, unless it overflows: then nothing but time is lost.
bool are_finite(at::ArrayRef<at::Tensor> tensors) {
  at::Tensor total;
  for (const at::Tensor& t : tensors) {
    if (!t.defined()) continue;
    const at::Tensor sum = t.sum(compute_type(t));
    total = total.defined() ? total + sum : sum;
  }
  return !total.defined() || std::isfinite(total.item<double>());
}

// Masks may hide pairs by minus infinity; all else that is summed over pairs counts.
bool are_finite(const AttentionArguments& a, const Tangents& tangents, const AttentionResult& results) {
  const auto& [out, lse] = results;
  std::vector<at::Tensor> numbers{a.query, a.key, a.value, out, lse.masked_fill(lse.isneginf(), 0)};
  numbers.insert(numbers.end(), tangents.begin(), tangents.end());
  const at::Tensor& sink = a.variants.sink;
  return are_finite(numbers) && (!sink.defined() || !sink.isnan().any().item<bool>());
}

// Tangents as kernels read them, and what they point into.
struct BoundTangents {
  kernels::TangentParams params;
  at::Tensor lse, sink;
  BoundArguments masks;
};

kernels::TensorView view_if_any(const at::Tensor& t) { return t.defined() ? view_of(t) : kernels::TensorView{}; }

// Float masks, in the places of those that they are tangents of.
BoundArguments bind_mask_tangents(const AttentionArguments& a, const Tangents& tangents) {
  AttentionArguments masks{a.query, a.key, a.value, tangents[3], tangents[4], {}};
  masks.num_appended_keys = a.num_appended_keys;
  masks.variants.relative_bias = tangents[5];
  return bind(masks);
}

BoundTangents bind_tangents(const AttentionArguments& a, const BoundArguments& bound, const Tangents& tangents,
                            const at::Tensor& lse) {
  BoundTangents t;
  t.lse = lse.contiguous();
  t.params.backward.attention = bound.params;
  t.params.backward.lse = t.lse.const_data_ptr();
  t.params.query = view_if_any(tangents[0]);
  t.params.key = view_if_any(tangents[1]);
  t.params.value = view_if_any(tangents[2]);
  t.masks = bind_mask_tangents(a, tangents);
  t.params.mask_tangents = t.masks.params;
  if (tangents[6].defined()) {
    t.sink = tangents[6].to(compute_type(a.query)).contiguous();
    t.params.sink_tangent = t.sink.const_data_ptr();
  }
  return t;
}

void set_output(const at::Tensor& out, const at::Tensor& rounding, kernels::BackwardParams& b) {
  b.out = view_of(out);
  if (rounding.defined() && rounding.dim() == 4) b.rounding = view_of(rounding);
}

// Tangents of out, into `moved_out`, and of lse.
at::Tensor move_results(const AttentionArguments& a, BoundTangents& t, const at::Tensor& moved_out) {
  const at::Tensor moved_lse = at::zeros_like(t.lse);
  kernels::TangentParams& m = t.params;
  kernels::AttentionParams& p = m.backward.attention;
  m.moved_out = mutable_view_of(moved_out);
  m.moved_lse = moved_lse.mutable_data_ptr();
  if (moved_lse.numel() == 0) return moved_lse;
  const kernels::KernelTable& kernel = kernels_for(compute_type(a.query));
  const int64_t blocks = divide_up(p.num_queries, p.query_block);
  const double multiply_adds = static_cast<double>(p.query_block) * static_cast<double>(p.num_keys) *
                               static_cast<double>(3 * p.head_dim + 2 * p.value_dim);
  parallel_units(p.batch * p.heads * blocks, multiply_adds, kernel.tangent_scratch_bytes(p),
                 [&](int64_t unit, void* scratch) {
                   const int64_t row = unit / blocks;
                   // Last block first: under a causal mask it is the longest.
                   const int64_t begin = (blocks - 1 - unit % blocks) * p.query_block;
                   const int64_t count = std::min(p.query_block, p.num_queries - begin);
                   kernel.tangent_block(m, {row / p.heads, row % p.heads, begin, count}, scratch);
                 });
  return moved_lse;
}

AttentionResult attention_jvp(const AttentionArguments& a, const ForwardTangents& t) {
  check_attention_jvp(a, t);
  if (!are_finite(a, t.inputs, {t.out, t.lse})) return attention_jvp_tiled(a, t);
  const BoundArguments bound = bind(a);
  BoundTangents tangents = bind_tangents(a, bound, t.inputs, t.lse);
  set_output(t.out, t.rounding, tangents.params.backward);
  const at::Tensor moved_out = empty_like_query(a.query, a.value.size(3));
  const at::Tensor moved_lse = move_results(a, tangents, moved_out);
  return {moved_out, moved_lse};
}

// Sums over a row that both passes need, (B, H, T_q) in the compute type: delta = rowsum(dO O) - dlse and its tangent.
struct RowSums {
  at::Tensor delta, moved_delta;
};

RowSums row_sums(const AttentionArguments& a, const BackwardTangents& t, const AttentionResult& moved) {
  const AttentionCotangents& c = t.cotangents;
  const at::ScalarType type = compute_type(a.query);
  at::Tensor out = c.out.to(type);
  if (c.rounding.defined() && c.rounding.dim() == 4) out = out + c.rounding;
  RowSums sums{at::zeros_like(c.lse), at::zeros_like(c.lse)};
  if (c.grad_out.defined()) {
    const at::Tensor grad = c.grad_out.to(type);
    sums.delta.add_((grad * out).sum(-1));
    sums.moved_delta.add_((grad * std::get<0>(moved)).sum(-1));
  }
  if (t.grad_out.defined()) sums.moved_delta.add_((t.grad_out.to(type) * out).sum(-1));
  if (c.grad_lse.defined()) sums.delta.sub_(c.grad_lse);
  if (t.grad_lse.defined()) sums.moved_delta.sub_(t.grad_lse);
  return sums;
}

// The tangent of -sum P_sink delta.
at::Tensor moved_sink_gradient(const AttentionArguments& a, const BackwardTangents& t, const at::Tensor& moved_lse,
                               const RowSums& sums) {
  const at::Tensor& lse = t.cotangents.lse;
  const at::Tensor share = sink_share(sink_in(a, lse.scalar_type()), lse);
  at::Tensor away = -moved_lse;
  if (t.inputs[6].defined()) away = away + t.inputs[6].to(lse.scalar_type()).unsqueeze(-1);
  return -(share * (away * sums.delta + sums.moved_delta))
              .sum(sink_rows(a.variants.sink))
              .to(a.variants.sink.scalar_type());
}

bool backward_is_finite(const AttentionArguments& a, const BackwardTangents& t) {
  const std::array<at::Tensor, 4> grads{t.cotangents.grad_out, t.cotangents.grad_lse, t.grad_out, t.grad_lse};
  return are_finite(a, t.inputs, {t.cotangents.out, t.cotangents.lse}) && are_finite(grads);
}

SecondGradients attention_backward_jvp(const AttentionArguments& a, const BackwardTangents& t) {
  check_attention_backward_jvp(a, t);
  if (!backward_is_finite(a, t)) return attention_backward_jvp_tiled(a, t);
  const AttentionCotangents& c = t.cotangents;
  const BoundArguments bound = bind(a);
  BoundTangents tangents = bind_tangents(a, bound, t.inputs, c.lse);
  kernels::TangentParams& m = tangents.params;
  set_output(c.out, c.rounding, m.backward);
  // In the compute type, as its row sums go on.
  const at::ScalarType type = compute_type(a.query);
  const at::Tensor moved_out = empty_like_query(a.query, a.value.size(3), a.query.options().dtype(type));
  const at::Tensor moved_lse = move_results(a, tangents, moved_out);
  const RowSums sums = row_sums(a, t, {moved_out, moved_lse});
  const at::Tensor grad_lse = c.grad_lse.defined() ? c.grad_lse.contiguous() : c.grad_lse;
  m.backward.grad_out = view_if_any(c.grad_out);
  m.backward.grad_lse = grad_lse.defined() ? grad_lse.const_data_ptr() : nullptr;
  m.grad_out = view_if_any(t.grad_out);
  m.moved_delta = sums.moved_delta.const_data_ptr();
  std::array<bool, kNumGradients> wanted;
  std::copy_n(t.output_mask.begin(), kNumGradients, wanted.begin());
  wanted[6] = false;  // the sink's is cheaper from what is known here
  auto [query, key, value, mask, padding, bias, sink] = run_tangent_backward(m, a, bound, wanted);
  if (t.output_mask[6]) sink = moved_sink_gradient(a, t, moved_lse, sums);
  return {query,
          key,
          value,
          mask,
          padding,
          bias,
          sink,
          t.output_mask[7] ? moved_out.to(a.query.scalar_type()) : at::Tensor(),
          t.output_mask[8] ? moved_lse : at::Tensor()};
}

}  // namespace

TORCH_LIBRARY_IMPL(mha_ext, CPU, m) {
  m.impl("attention_jvp", &attention_jvp_kernel<attention_jvp>);
  m.impl("attention_backward_jvp", &attention_backward_jvp_kernel<attention_backward_jvp>);
}

}  // namespace mha_ext::cpu
