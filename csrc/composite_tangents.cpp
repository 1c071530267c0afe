// Derivatives along tangents, in ATen operators: over all pairs at once, or block by block so that memory is linear in
// the length (what a block of queries sees needs no other block's rows but the sums over queries).
#include <ATen/TensorOperators.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>
#include <ATen/ops/zeros_like.h>
#include <torch/library.h>

#include <algorithm>

#include "checks.h"
#include "composite.h"
#include "layout.h"
#include "signatures.h"
#include "tangents.h"

namespace mha_ext {
namespace {

using pairs::Motion;
using pairs::Part;
using pairs::Problem;

// Inputs, or tangents of them, in the order of kNumGradients.
std::array<at::Tensor*, kNumGradients> inputs_of(AttentionArguments& a) {
  return {&a.query, &a.key, &a.value, &a.attn_mask, &a.key_padding_mask, &a.variants.relative_bias, &a.variants.sink};
}

// The tangents in the places of what they are tangents of.
AttentionArguments as_arguments(const Tangents& tangents) {
  AttentionArguments a;
  const auto places = inputs_of(a);
  for (size_t i = 0; i < kNumGradients; ++i) *places[i] = tangents[i];
  return a;
}

Tangents as_tangents(AttentionArguments a) {
  Tangents tangents;
  const auto places = inputs_of(a);
  for (size_t i = 0; i < kNumGradients; ++i) tangents[i] = *places[i];
  return tangents;
}

struct Range {
  int64_t begin, count;
};

struct Block {
  Range samples, kv_heads, heads, queries;
};

struct Sizes {
  int64_t samples, kv_heads, group, queries, masked_keys;
};

Sizes sizes_of(const AttentionArguments& a) {
  return {a.query.size(0), a.key.size(1), a.query.size(1) / a.key.size(1), a.query.size(2),
          a.key.size(2) - a.num_appended_keys};
}

// An axis along which a tensor may be broadcast.
at::Tensor along(const at::Tensor& t, int64_t axis, const Range& range) {
  return !t.defined() || t.size(axis) == 1 ? t : t.narrow(axis, range.begin, range.count);
}

at::Tensor rows_in(const at::Tensor& t, const Block& block) {
  return along(along(along(t, 0, block.samples), 1, block.heads), 2, block.queries);
}

at::Tensor keys_in(const at::Tensor& t, const Block& block) {
  return along(along(t, 0, block.samples), 1, block.kv_heads);
}

// Entry T_q - 1 + j - i of the whole is entry n - 1 + j - (i - first) of n queries.
at::Tensor bias_in(const at::Tensor& t, const Block& block, const Sizes& sizes) {
  if (!t.defined()) return t;
  const Range& rows = block.queries;
  const int64_t count = std::max<int64_t>(rows.count + sizes.masked_keys - 1, 0);
  return along(along(t, 0, block.samples), 1, block.heads).narrow(2, sizes.queries - rows.begin - rows.count, count);
}

// Of the arguments, of their tangents, or of what sums the gradients.
AttentionArguments narrowed(const AttentionArguments& a, const Block& block, const Sizes& sizes) {
  AttentionArguments part = a;
  part.query = rows_in(a.query, block);
  part.key = keys_in(a.key, block), part.value = keys_in(a.value, block);
  part.attn_mask = rows_in(a.attn_mask, block);
  part.key_padding_mask = along(a.key_padding_mask, 0, block.samples);
  Variants& v = part.variants;
  v.key_range = along(along(v.key_range, 1, block.samples), 2, block.queries);
  v.relative_bias = bias_in(v.relative_bias, block, sizes);
  if (v.sink.defined() && v.sink.dim() == 2) v.sink = along(v.sink, 0, block.samples);
  v.sink = along(v.sink, -1, block.heads);
  return part;
}

Part part_of(const AttentionArguments& a, const Block& block) {
  Part part = pairs::whole_of(a);
  part.first_sample = block.samples.begin, part.first_head = block.heads.begin, part.first_query = block.queries.begin;
  return part;
}

// Calls run(block) for blocks of about a million pairs, which in float32 are 4 MiB a tensor. Not tuned: the kernels
// serve CPU.
template <typename Run>
void for_each_block(const AttentionArguments& a, const Run& run) {
  constexpr int64_t kPairs = int64_t{1} << 20;
  const Sizes s = sizes_of(a);
  const int64_t keys = std::max<int64_t>(a.key.size(2), 1), row = s.group * keys, head = row * s.queries;
  const auto fitting = [](int64_t pairs, int64_t most) {
    return std::clamp<int64_t>(kPairs / std::max<int64_t>(pairs, 1), 1, std::max<int64_t>(most, 1));
  };
  const int64_t samples = fitting(head * s.kv_heads, s.samples);
  const int64_t kv_heads = samples > 1 ? s.kv_heads : fitting(head, s.kv_heads);
  const int64_t queries = samples > 1 || kv_heads > 1 ? s.queries : fitting(row, s.queries);
  for (int64_t b = 0; b < s.samples; b += samples) {
    for (int64_t h = 0; h < s.kv_heads; h += kv_heads) {
      const Range heads{h, std::min(kv_heads, s.kv_heads - h)};
      for (int64_t i = 0; i < s.queries; i += queries) {
        run(Block{{b, std::min(samples, s.samples - b)},
                  heads,
                  {heads.begin * s.group, heads.count * s.group},
                  {i, std::min(queries, s.queries - i)}});
      }
    }
  }
}

at::TensorOptions computing(const AttentionArguments& a) {
  return a.query.options().dtype(pairs::compute_dtype(a.query));
}

// Zeros where gradients are summed, lying as they will be returned; undefined where none is wanted.
AttentionArguments make_sums(const AttentionArguments& a, const std::array<bool, kNumSecondGradients>& wanted) {
  AttentionArguments sums, like = a;
  const auto places = inputs_of(sums), shapes = inputs_of(like);
  for (size_t i = 0; i < kNumGradients; ++i) {
    if (!wanted[i]) continue;
    *places[i] =
        i < 3 ? at::zeros_like(shapes[i]->transpose(1, 2), computing(a), at::MemoryFormat::Contiguous).transpose(1, 2)
              : at::zeros(shapes[i]->sizes(), computing(a));
  }
  return sums;
}

}  // namespace

AttentionResult attention_jvp_math(const AttentionArguments& a, const ForwardTangents& t) {
  check_attention_jvp(a, t);
  const c10::impl::ExcludeDispatchKeyGuard no_autocast(c10::autocast_dispatch_keyset);
  const Problem p = pairs::make_problem(a);
  const auto [out, lse] = pairs::moved_results(a, p, pairs::move(a, p, t.inputs));
  return {lay_out_like_query(out.to(a.query.scalar_type()), a.query), lse.contiguous()};
}

SecondGradients attention_backward_jvp_math(const AttentionArguments& a, const BackwardTangents& t) {
  check_attention_backward_jvp(a, t);
  const c10::impl::ExcludeDispatchKeyGuard no_autocast(c10::autocast_dispatch_keyset);
  const Problem p = pairs::make_problem(a);
  const Motion m = pairs::move(a, p, t.inputs);
  const auto g = pairs::moved_gradients(a, p, m, t);
  AttentionResult moved;
  if (t.output_mask[7] || t.output_mask[8]) moved = pairs::moved_results(a, p, m);
  const auto& [out, lse] = moved;
  const at::Tensor none;
  return std::tuple_cat(
      pairs::finish_all(g, a),
      AttentionResult(t.output_mask[7] ? lay_out_like_query(out.to(a.query.scalar_type()), a.query) : none,
                      t.output_mask[8] ? lse.contiguous() : none));
}

AttentionResult attention_jvp_tiled(const AttentionArguments& a, const ForwardTangents& t) {
  check_attention_jvp(a, t);
  const c10::impl::ExcludeDispatchKeyGuard no_autocast(c10::autocast_dispatch_keyset);
  const at::Tensor out = empty_like_query(a.query, a.value.sym_size(3));
  const at::Tensor lse = at::empty({a.query.size(0), a.query.size(1), a.query.size(2)}, computing(a));
  const Sizes sizes = sizes_of(a);
  const AttentionArguments tangents = as_arguments(t.inputs);
  for_each_block(a, [&](const Block& block) {
    const AttentionArguments part = narrowed(a, block, sizes);
    const Problem p = pairs::make_problem(part, part_of(a, block));
    const Motion m = pairs::move(part, p, as_tangents(narrowed(tangents, block, sizes)));
    const auto [moved_out, moved_lse] = pairs::moved_results(part, p, m);
    rows_in(out, block).copy_(moved_out);
    rows_in(lse, block).copy_(moved_lse);
  });
  return {out, lse};
}

SecondGradients attention_backward_jvp_tiled(const AttentionArguments& a, const BackwardTangents& t) {
  check_attention_backward_jvp(a, t);
  const c10::impl::ExcludeDispatchKeyGuard no_autocast(c10::autocast_dispatch_keyset);
  const auto& wanted = t.output_mask;
  at::Tensor out, lse;
  if (wanted[7]) out = empty_like_query(a.query, a.value.sym_size(3));
  if (wanted[8]) lse = at::empty({a.query.size(0), a.query.size(1), a.query.size(2)}, computing(a));
  const Sizes sizes = sizes_of(a);
  const AttentionArguments tangents = as_arguments(t.inputs), sums = make_sums(a, wanted);
  for_each_block(a, [&](const Block& block) {
    const AttentionArguments part = narrowed(a, block, sizes);
    BackwardTangents of_part = t;
    of_part.inputs = as_tangents(narrowed(tangents, block, sizes));
    for (at::Tensor* rows :
         {&of_part.cotangents.grad_out, &of_part.cotangents.grad_lse, &of_part.grad_out, &of_part.grad_lse}) {
      *rows = rows_in(*rows, block);
    }
    const Problem p = pairs::make_problem(part, part_of(a, block));
    const Motion m = pairs::move(part, p, of_part.inputs);
    const auto gradients = pairs::moved_gradients(part, p, m, of_part);
    const Tangents places = as_tangents(narrowed(sums, block, sizes));
    for (size_t i = 0; i < kNumGradients; ++i) {
      if (wanted[i]) places[i].add_(gradients[i]);
    }
    if (!wanted[7] && !wanted[8]) return;
    const auto [moved_out, moved_lse] = pairs::moved_results(part, p, m);
    if (wanted[7]) rows_in(out, block).copy_(moved_out);
    if (wanted[8]) rows_in(lse, block).copy_(moved_lse);
  });
  return std::tuple_cat(pairs::finish_all(as_tangents(sums), a), AttentionResult(out, lse));
}

TORCH_LIBRARY_IMPL(mha_ext, CompositeExplicitAutograd, m) {
  m.impl("attention_jvp", TORCH_FN(attention_jvp_kernel<attention_jvp_tiled>));
  m.impl("attention_backward_jvp", TORCH_FN(attention_backward_jvp_kernel<attention_backward_jvp_tiled>));
}

}  // namespace mha_ext
