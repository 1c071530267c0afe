// The whole layer: packed projections, attention on views of them, output projection; and its backward. Both call our
// attention operators through the dispatcher, so they serve every device, and they are differentiable where those are.
#include <ATen/TensorOperators.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/isfinite.h>
#include <ATen/ops/mm.h>
#include <torch/library.h>

#include <vector>

#include "checks.h"
#include "composite.h"
#include "cpu/backward_into.h"
#include "cpu/layer_with_weights.h"
#include "cpu/products.h"
#include "differentiation.h"
#include "layer.h"
#include "linear.h"
#include "pairs.h"
#include "signatures.h"

namespace mha_ext {
namespace {

using layer::head_dim;
using layer::HeadRows;
using layer::Projection;
using layer::Projections;
using layer::projections;

// `packed` is in_proj_weight or in_proj_bias.
at::Tensor rows_of(const LayerArguments& a, const at::Tensor& packed, const HeadRows& rows) {
  const bool all = rows.count == a.num_heads + 2 * a.num_kv_heads;
  if (!packed.defined() || all) return packed;
  return packed.narrow_symint(0, rows.first * head_dim(a), rows.count * head_dim(a));
}

at::Tensor project(const LayerArguments& a, const at::Tensor& input, const HeadRows& rows) {
  return linear(input, rows_of(a, a.in_proj_weight, rows), rows_of(a, a.in_proj_bias, rows));
}

// (B, T, n * D) or (T, B, n * D) as a (B, n, T, D) view.
at::Tensor split_heads(const LayerArguments& a, const at::Tensor& packed) {
  const at::Tensor heads = packed.unflatten_symint(-1, {-1, head_dim(a)});
  return a.batch_first ? heads.transpose(1, 2) : heads.permute({1, 2, 0, 3});
}

// The reverse; a view when the tensor lies as (B, T, H, D) and batch_first.
at::Tensor combine_heads(const LayerArguments& a, const at::Tensor& heads) {
  return (a.batch_first ? heads.transpose(1, 2) : heads.permute({2, 0, 1, 3})).flatten(2);
}

AttentionArguments attention_arguments(const LayerArguments& a, const LayerState& s) {
  AttentionArguments arguments{{},          {},       {},     a.attn_mask, a.key_padding_mask, a.dropout_seed,
                               a.dropout_p, a.causal, a.scale};
  const int64_t h = a.num_heads, g = a.num_kv_heads;
  if (a.shared_inputs == kSharedAll) {
    const std::vector<at::Tensor> parts = split_heads(a, s.q).split_with_sizes({h, g, g}, 1);
    arguments.query = parts[0], arguments.key = parts[1], arguments.value = parts[2];
    return arguments;
  }
  arguments.query = split_heads(a, s.q);
  if (a.shared_inputs == kSharedKeyValue) {
    const std::vector<at::Tensor> parts = split_heads(a, s.k).split_with_sizes({g, g}, 1);
    arguments.key = parts[0], arguments.value = parts[1];
  } else {
    arguments.key = split_heads(a, s.k), arguments.value = split_heads(a, s.v);
  }
  return arguments;
}

// The projections, with empty buffers where one serves several inputs; the rest of the state is left out.
LayerState projected(const LayerArguments& a) {
  LayerState s;
  const std::array<at::Tensor*, 3> buffers{&s.q, &s.k, &s.v};
  const Projections products = projections(a);
  for (size_t i = 0; i < buffers.size(); ++i) {
    *buffers[i] =
        i < products.size() ? project(a, *products[i].input, products[i].rows) : at::empty({0}, a.query.options());
  }
  return s;
}

// Everything but the output projection.
LayerState attend(const LayerArguments& a) {
  LayerState s = projected(a);
  at::Tensor heads;
  if (layer::keeps_rounding(a)) {
    at::Tensor weights, rounding;
    std::tie(heads, s.lse, weights, rounding) = call_attention_for_backward(attention_arguments(a, s), kNoWeights);
    s.rounding = combine_heads(a, rounding).contiguous();
  } else {
    std::tie(heads, s.lse) = call_attention(attention_arguments(a, s));
    s.rounding = at::empty({0}, heads.options().dtype(at::kBFloat16));
  }
  s.context = combine_heads(a, heads).contiguous();  // what the Meta kernel promises; the product copies it otherwise
  return s;
}

at::Tensor flat_rows(const at::Tensor& tensor) { return tensor.flatten(0, 1); }

// True at the rows of an input, (B or 1, T or 1), that are without influence: keys that no query sees in any head, and
// queries that see no key in any head. A row that is both query and key must be both.
at::Tensor unused_rows(const LayerArguments& a, bool as_query, bool as_key) {
  const auto as_heads = [&](const at::Tensor& input) {
    return (a.batch_first ? input : input.transpose(0, 1)).unsqueeze(1);
  };
  AttentionArguments arguments;
  arguments.query = as_heads(a.query), arguments.key = as_heads(a.key);
  arguments.attn_mask = a.attn_mask, arguments.key_padding_mask = a.key_padding_mask, arguments.causal = a.causal;
  const at::Tensor hidden = pairs::hidden_pairs(arguments, pairs::whole_of(arguments));
  const at::Tensor queries = as_query ? hidden.all(3).all(1) : at::Tensor();
  const at::Tensor keys = as_key ? hidden.all(2).all(1) : at::Tensor();
  if (as_query && as_key) return queries.logical_and(keys);
  return as_query ? queries : keys;
}

// Rows without influence as 0: else what they hold (NaN, say) would reach the weights' gradient as 0 * NaN.
LayerArguments without_unused_rows(const LayerArguments& a) {
  // The causal mask of self-attention hides no key, and no query, entirely.
  const bool masked = a.attn_mask.defined() || a.key_padding_mask.defined() ||
                      (a.causal != kNotCausal && a.shared_inputs != kSharedAll);
  const auto clean = [&](const at::Tensor& input, bool as_query, bool as_key) {
    if (!masked || (pairs::has_readable_values(input) && at::isfinite(input.detach().sum()).item<bool>())) return input;
    const at::Tensor unused = unused_rows(a, as_query, as_key).unsqueeze(-1);
    return input.masked_fill(a.batch_first ? unused : unused.transpose(0, 1), 0);
  };
  LayerArguments cleaned = a;
  cleaned.query = clean(a.query, /*as_query=*/true, /*as_key=*/a.shared_inputs == kSharedAll);
  if (a.shared_inputs == kSharedAll) {
    cleaned.key = cleaned.value = cleaned.query;
    return cleaned;
  }
  cleaned.key = clean(a.key, /*as_query=*/false, /*as_key=*/true);
  cleaned.value = a.shared_inputs == kSharedKeyValue ? cleaned.key : clean(a.value, false, true);
  return cleaned;
}

LayerResult compute(const LayerArguments& a) {
  const LayerState s = attend(a);
  const at::Tensor out = linear(s.context, a.out_proj_weight, a.out_proj_bias);
  return {out, s.q, s.k, s.v, s.context, s.lse, s.rounding};
}

at::Tensor side_by_side(const std::vector<at::Tensor>& parts, int64_t dim) {
  return parts.size() == 1 ? parts.front() : at::cat(parts, dim);
}

// The gradients of the projections' results, one for each product and (rows, its width), and of the masks.
struct JoinedGradients {
  std::vector<at::Tensor> projections;
  at::Tensor attn_mask, key_padding_mask;
};

// The backward operator's gradients, put side by side as the projections are.
JoinedGradients joined_copies(const LayerArguments& a, const AttentionArguments& arguments,
                              const AttentionCotangents& cotangents) {
  const auto [query, key, value, attn_mask, padding, bias, sink] = call_attention_backward(arguments, cotangents);
  std::vector<at::Tensor> parts;
  for (const at::Tensor& grad : {query, key, value}) {
    parts.push_back(grad.defined() ? flat_rows(combine_heads(a, grad)) : grad);
  }
  if (!key.defined() && a.shared_inputs != kSeparateInputs) {
    parts = {parts[0], {}};
  } else if (a.shared_inputs == kSharedAll) {
    parts = {at::cat(parts, 1)};
  } else if (a.shared_inputs == kSharedKeyValue) {
    parts = {parts[0], at::cat({parts[1], parts[2]}, 1)};
  }
  return {parts, attn_mask, padding};
}

// The same, written by the CPU kernels where it belongs.
JoinedGradients joined_in_place(const LayerArguments& a, const AttentionArguments& arguments,
                                const AttentionCotangents& cotangents) {
  const auto& wanted = cotangents.output_mask;
  if (!wanted[0] || !wanted[1] || !wanted[2]) return joined_copies(a, arguments, cotangents);
  LayerState buffers;
  const std::array<at::Tensor*, 3> slots{&buffers.q, &buffers.k, &buffers.v};
  JoinedGradients joined;
  for (const Projection& product : projections(a)) {
    at::Tensor& buffer = *slots[joined.projections.size()];
    buffer = at::empty({product.input->size(0), product.input->size(1), product.rows.count * arguments.query.size(3)},
                       arguments.query.options());
    joined.projections.push_back(flat_rows(buffer));
  }
  const AttentionArguments views = attention_arguments(a, buffers);
  const AttentionGradients grads =
      cpu::attention_backward_into(arguments, cotangents, {views.query, views.key, views.value});
  joined.attn_mask = std::get<3>(grads), joined.key_padding_mask = std::get<4>(grads);
  return joined;
}

// How the backward operator computes: as a composition that can be differentiated in its turn, or on CPU.
struct Composed {
  static constexpr auto joined = joined_copies;
  static at::Tensor product(const at::Tensor& left, const at::Tensor& right) { return at::mm(left, right); }
  static at::Tensor transposed_product(const at::Tensor& left, const at::Tensor& right) {
    return at::mm(left.t(), right);
  }
};
struct OnCpu {
  static constexpr auto joined = joined_in_place;
  static constexpr auto product = cpu::product;
  static constexpr auto transposed_product = cpu::transposed_product;
};

// grads[i] belongs to projections(a)[i]: (rows, its width), undefined when nobody needs it. Fills the first five.
template <class Way>
void projection_gradients(const LayerArguments& a, const std::vector<at::Tensor>& grads,
                          const std::array<bool, kNumLayerGradients>& wanted,
                          std::array<at::Tensor, kNumLayerGradients>& result) {
  const Projections products = projections(a);
  std::vector<at::Tensor> weight_parts, bias_parts;
  for (size_t i = 0; i < products.size(); ++i) {
    const at::Tensor& input = *products[i].input;
    if (wanted[i]) {
      const at::Tensor product = Way::product(grads[i], rows_of(a, a.in_proj_weight, products[i].rows));
      result[i] = product.unflatten_symint(0, {input.sym_size(0), input.sym_size(1)});
    }
    if (wanted[3]) weight_parts.push_back(Way::transposed_product(grads[i], flat_rows(input)));
    if (wanted[4]) bias_parts.push_back(grads[i].sum(0));
  }
  if (wanted[3]) result[3] = side_by_side(weight_parts, 0);
  if (wanted[4]) result[4] = side_by_side(bias_parts, 0);
}

// Which of the attention's five gradients the layer's wanted ones need.
std::array<bool, kNumGradients> attention_mask(const LayerArguments& a,
                                               const std::array<bool, kNumLayerGradients>& wanted) {
  const bool parameters = wanted[3] || wanted[4];
  const bool query = wanted[0] || parameters;
  const bool key = (a.shared_inputs == kSharedAll ? wanted[0] : wanted[1]) || parameters;
  const bool value = (a.shared_inputs == kSeparateInputs ? wanted[2] || parameters : key);
  return {query, key, value, wanted[7], wanted[8]};
}

std::array<bool, kNumLayerGradients> existing_gradients(const LayerArguments& a,
                                                        std::array<bool, kNumLayerGradients> wanted) {
  wanted[1] = wanted[1] && a.shared_inputs != kSharedAll;
  wanted[2] = wanted[2] && a.shared_inputs == kSeparateInputs;
  return wanted;
}

template <class Way>
LayerGradients layer_backward(const LayerArguments& a, const LayerCotangents& c) {
  check_layer_backward(a, c);
  const c10::impl::ExcludeDispatchKeyGuard no_autocast(c10::autocast_dispatch_keyset);
  const auto wanted = existing_gradients(a, c.output_mask);
  std::array<at::Tensor, kNumLayerGradients> result;
  const at::Tensor grad_out = flat_rows(c.grad_out);
  if (wanted[5]) result[5] = Way::transposed_product(grad_out, flat_rows(c.state.context));
  if (wanted[6]) result[6] = grad_out.sum(0);
  const std::array<bool, kNumGradients> needed = attention_mask(a, wanted);
  if (std::find(needed.begin(), needed.end(), true) != needed.end()) {
    const at::Tensor grad_context =
        Way::product(grad_out, a.out_proj_weight).unflatten_symint(0, {c.grad_out.sym_size(0), c.grad_out.sym_size(1)});
    const bool rounded = c.state.rounding.dim() == 3;
    const at::Tensor rounding = rounded ? split_heads(a, c.state.rounding) : at::Tensor();
    const JoinedGradients grads = Way::joined(
        a, attention_arguments(a, c.state),
        AttentionCotangents{
            split_heads(a, grad_context), {}, split_heads(a, c.state.context), c.state.lse, needed, rounding});
    projection_gradients<Way>(wanted[3] ? without_unused_rows(a) : a, grads.projections, wanted, result);
    result[7] = grads.attn_mask, result[8] = grads.key_padding_mask;
  }
  return std::tuple_cat(result);
}

}  // namespace

LayerResult multi_head_attention_composed(const LayerArguments& a) {
  check_layer(a);
  return compute(a);
}

AttentionResult multi_head_attention_with_weights(const LayerArguments& a, bool average) {
  check_layer(a);
  const std::array<at::Tensor, 9> inputs{a.query,          a.key,          a.value,
                                         a.in_proj_weight, a.in_proj_bias, a.out_proj_weight,
                                         a.out_proj_bias,  a.attn_mask,    a.key_padding_mask};
  if (runs_on_cpu_alone(inputs) && !needs_gradient(inputs)) return cpu::layer_with_weights(a, average);
  const AttentionArguments arguments = attention_arguments(a, projected(a));
  const auto [heads, lse, weights] = call_attention_with_weights(arguments, average);
  const at::Tensor context = combine_heads(a, heads).contiguous();
  return {linear(context, a.out_proj_weight, a.out_proj_bias), weights};
}

LayerResult multi_head_attention_differentiable(const LayerArguments& a) {
  check_layer(a);
  const auto [out, q, k, v, context, lse, rounding] = compute(without_unused_rows(a));
  return {out, q.detach(), k.detach(), v.detach(), context.detach(), lse.detach(), rounding.detach()};
}

LayerGradients multi_head_attention_backward_composed(const LayerArguments& a, const LayerCotangents& c) {
  return layer_backward<Composed>(a, c);
}

LayerGradients multi_head_attention_backward_from_inputs(const LayerArguments& a, const LayerCotangents& c) {
  check_layer_backward(a, c);
  const c10::impl::ExcludeDispatchKeyGuard no_autocast(c10::autocast_dispatch_keyset);
  const LayerArguments cleaned = without_unused_rows(a);
  return multi_head_attention_backward_composed(cleaned, {c.grad_out, attend(cleaned), c.output_mask});
}

TORCH_LIBRARY_IMPL(mha_ext, CompositeExplicitAutograd, m) {
  m.impl("multi_head_attention", TORCH_FN(multi_head_attention_kernel<multi_head_attention_composed>));
  m.impl("multi_head_attention_backward",
         TORCH_FN(multi_head_attention_backward_kernel<multi_head_attention_backward_composed>));
}

TORCH_LIBRARY_IMPL(mha_ext, CPU, m) {
  m.impl("multi_head_attention_backward", TORCH_FN(multi_head_attention_backward_kernel<layer_backward<OnCpu>>));
}

}  // namespace mha_ext
