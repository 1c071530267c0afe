// Every operator's schema, and the typed callers that attention.h declares.
#include <torch/library.h>

#include <string>
#include <vector>

#include "attention.h"
#include "signatures.h"

namespace mha_ext {
namespace {

template <typename Signature>
c10::TypedOperatorHandle<Signature> find(const char* name) {
  return c10::Dispatcher::singleton().findSchemaOrThrow(name, "").typed<Signature>();
}

}  // namespace

AttentionResult call_attention(const AttentionArguments& a) {
  const Variants& v = a.variants;
  static const auto op = find<decltype(attention_kernel<nullptr>)>("mha_ext::attention");
  return op.call(a.query, a.key, a.value, to_optional(a.attn_mask), to_optional(a.key_padding_mask),
                 to_optional(a.dropout_seed), a.dropout_p, a.causal, a.scale, a.num_appended_keys,
                 to_optional(v.key_range), to_optional(v.relative_bias), to_optional(v.sink), v.window_left,
                 v.window_right, v.softcap);
}

AttentionResult call_paged_attention(const PagedArguments& a) {
  static const auto op = find<decltype(paged_attention_kernel<nullptr>)>("mha_ext::paged_attention");
  return op.call(a.query, a.key_pages, a.value_pages, a.page_table, a.key_range, to_optional(a.sink), a.scale,
                 a.softcap);
}

AttentionGradients call_attention_backward(const AttentionArguments& a, const AttentionCotangents& c) {
  const Variants& v = a.variants;
  static const auto op = find<decltype(attention_backward_kernel<nullptr>)>("mha_ext::attention_backward");
  return op.call(to_optional(c.grad_out), to_optional(c.grad_lse), a.query, a.key, a.value, to_optional(a.attn_mask),
                 to_optional(a.key_padding_mask), to_optional(a.dropout_seed), c.out, c.lse, a.dropout_p, a.causal,
                 a.scale, a.num_appended_keys, c.output_mask, to_optional(c.rounding), to_optional(v.key_range),
                 to_optional(v.relative_bias), to_optional(v.sink), v.window_left, v.window_right, v.softcap);
}

AttentionResult call_attention_jvp(const AttentionArguments& a, const ForwardTangents& t) {
  const Variants& v = a.variants;
  static const auto op = find<decltype(attention_jvp_kernel<nullptr>)>("mha_ext::attention_jvp");
  return op.call(a.query, a.key, a.value, to_optional(a.attn_mask), to_optional(a.key_padding_mask),
                 to_optional(a.dropout_seed), t.out, t.lse, to_optional(t.inputs[0]), to_optional(t.inputs[1]),
                 to_optional(t.inputs[2]), to_optional(t.inputs[3]), to_optional(t.inputs[4]), to_optional(t.inputs[5]),
                 to_optional(t.inputs[6]), a.dropout_p, a.causal, a.scale, a.num_appended_keys, to_optional(t.rounding),
                 to_optional(v.key_range), to_optional(v.relative_bias), to_optional(v.sink), v.window_left,
                 v.window_right, v.softcap);
}

SecondGradients call_attention_backward_jvp(const AttentionArguments& a, const BackwardTangents& t) {
  const Variants& v = a.variants;
  const AttentionCotangents& c = t.cotangents;
  static const auto op = find<decltype(attention_backward_jvp_kernel<nullptr>)>("mha_ext::attention_backward_jvp");
  return op.call(to_optional(c.grad_out), to_optional(c.grad_lse), a.query, a.key, a.value, to_optional(a.attn_mask),
                 to_optional(a.key_padding_mask), to_optional(a.dropout_seed), c.out, c.lse, to_optional(t.inputs[0]),
                 to_optional(t.inputs[1]), to_optional(t.inputs[2]), to_optional(t.inputs[3]), to_optional(t.inputs[4]),
                 to_optional(t.inputs[5]), to_optional(t.inputs[6]), to_optional(t.grad_out), to_optional(t.grad_lse),
                 a.dropout_p, a.causal, a.scale, a.num_appended_keys, t.output_mask, to_optional(c.rounding),
                 to_optional(v.key_range), to_optional(v.relative_bias), to_optional(v.sink), v.window_left,
                 v.window_right, v.softcap);
}

WeightsResult call_attention_with_weights(const AttentionArguments& a, bool average) {
  const Variants& v = a.variants;
  static const auto op = find<decltype(attention_with_weights_kernel<nullptr>)>("mha_ext::attention_with_weights");
  return op.call(a.query, a.key, a.value, to_optional(a.attn_mask), to_optional(a.key_padding_mask),
                 to_optional(a.dropout_seed), a.dropout_p, a.causal, a.scale, a.num_appended_keys, average,
                 to_optional(v.key_range), to_optional(v.relative_bias), to_optional(v.sink), v.window_left,
                 v.window_right, v.softcap);
}

ForBackwardResult call_attention_for_backward(const AttentionArguments& a, int64_t weights) {
  const Variants& v = a.variants;
  static const auto op = find<decltype(attention_for_backward_kernel<nullptr>)>("mha_ext::attention_for_backward");
  return op.call(a.query, a.key, a.value, to_optional(a.attn_mask), to_optional(a.key_padding_mask),
                 to_optional(a.dropout_seed), a.dropout_p, a.causal, a.scale, a.num_appended_keys, weights,
                 to_optional(v.key_range), to_optional(v.relative_bias), to_optional(v.sink), v.window_left,
                 v.window_right, v.softcap);
}

WeightsGradients call_attention_weights_backward(const AttentionArguments& a, const WeightsCotangents& c) {
  const Variants& v = a.variants;
  static const auto op =
      find<decltype(attention_weights_backward_kernel<nullptr>)>("mha_ext::attention_weights_backward");
  return op.call(c.grad_weights, a.query, a.key, to_optional(a.attn_mask), to_optional(a.key_padding_mask),
                 to_optional(a.dropout_seed), c.lse, a.dropout_p, a.causal, a.scale, a.num_appended_keys, c.average,
                 c.output_mask, to_optional(v.key_range), to_optional(v.relative_bias), to_optional(v.sink),
                 v.window_left, v.window_right, v.softcap);
}

LayerResult call_multi_head_attention(const LayerArguments& a) {
  static const auto op = find<decltype(multi_head_attention_kernel<nullptr>)>("mha_ext::multi_head_attention");
  return op.call(a.query, a.key, a.value, a.in_proj_weight, to_optional(a.in_proj_bias), a.out_proj_weight,
                 to_optional(a.out_proj_bias), to_optional(a.attn_mask), to_optional(a.key_padding_mask),
                 to_optional(a.dropout_seed), a.num_heads, a.num_kv_heads, a.shared_inputs, a.batch_first, a.dropout_p,
                 a.causal, a.scale, a.keep_rounding);
}

LayerGradients call_multi_head_attention_backward(const LayerArguments& a, const LayerCotangents& c) {
  static const auto op =
      find<decltype(multi_head_attention_backward_kernel<nullptr>)>("mha_ext::multi_head_attention_backward");
  const LayerState& s = c.state;
  return op.call(c.grad_out, a.query, a.key, a.value, a.in_proj_weight, to_optional(a.in_proj_bias), a.out_proj_weight,
                 to_optional(a.out_proj_bias), to_optional(a.attn_mask), to_optional(a.key_padding_mask),
                 to_optional(a.dropout_seed), s.q, s.k, s.v, s.context, s.lse, s.rounding, a.num_heads, a.num_kv_heads,
                 a.shared_inputs, a.batch_first, a.dropout_p, a.causal, a.scale, c.output_mask);
}

// The last arguments of every attention operator (Variants in attention.h).
const std::string kVariants =
    "Tensor? key_range=None, Tensor? relative_bias=None, Tensor? sink=None, int window_left=-1, int window_right=-1, "
    "float softcap=0.0";

// Those of Tangents in attention.h.
const std::string kTangents =
    "Tensor? query_tangent, Tensor? key_tangent, Tensor? value_tangent, Tensor? attn_mask_tangent, "
    "Tensor? key_padding_mask_tangent, Tensor? relative_bias_tangent, Tensor? sink_tangent";

TORCH_LIBRARY(mha_ext, m) {
  const std::vector<at::Tag> tags{at::Tag::pt2_compliant_tag};
  const auto define_attention = [&](const std::string& signature, const std::string& results) {
    m.def((signature + ", " + kVariants + ") -> " + results).c_str(), tags);
  };
  define_attention(
      "attention(Tensor query, Tensor key, Tensor value, Tensor? attn_mask=None, Tensor? key_padding_mask=None, "
      "Tensor? dropout_seed=None, *, float dropout_p=0.0, int causal=0, float? scale=None, int num_appended_keys=0",
      "(Tensor out, Tensor lse)");
  define_attention(
      "attention_backward(Tensor? grad_out, Tensor? grad_lse, Tensor query, Tensor key, Tensor value, "
      "Tensor? attn_mask, Tensor? key_padding_mask, Tensor? dropout_seed, Tensor out, Tensor lse, *, float dropout_p, "
      "int causal, float? scale, int num_appended_keys, bool[7] output_mask, Tensor? rounding=None",
      "(Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)");
  define_attention(
      "attention_jvp(Tensor query, Tensor key, Tensor value, Tensor? attn_mask, Tensor? key_padding_mask, "
      "Tensor? dropout_seed, Tensor out, Tensor lse, " +
          kTangents +
          ", *, float dropout_p, int causal, "
          "float? scale, int num_appended_keys, Tensor? rounding=None",
      "(Tensor out, Tensor lse)");
  define_attention(
      "attention_backward_jvp(Tensor? grad_out, Tensor? grad_lse, Tensor query, Tensor key, Tensor value, "
      "Tensor? attn_mask, Tensor? key_padding_mask, Tensor? dropout_seed, Tensor out, Tensor lse, " +
          kTangents +
          ", "
          "Tensor? grad_out_tangent, Tensor? grad_lse_tangent, *, float dropout_p, int causal, float? scale, "
          "int num_appended_keys, bool[9] output_mask, Tensor? rounding=None",
      "(Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)");
  define_attention(
      "attention_with_weights(Tensor query, Tensor key, Tensor value, Tensor? attn_mask=None, "
      "Tensor? key_padding_mask=None, Tensor? dropout_seed=None, *, float dropout_p=0.0, int causal=0, "
      "float? scale=None, int num_appended_keys=0, bool average=True",
      "(Tensor out, Tensor lse, Tensor weights)");
  define_attention(
      "attention_for_backward(Tensor query, Tensor key, Tensor value, Tensor? attn_mask=None, "
      "Tensor? key_padding_mask=None, Tensor? dropout_seed=None, *, float dropout_p=0.0, int causal=0, "
      "float? scale=None, int num_appended_keys=0, int weights=0",
      "(Tensor out, Tensor lse, Tensor weights, Tensor rounding)");
  define_attention(
      "attention_weights_backward(Tensor grad_weights, Tensor query, Tensor key, Tensor? attn_mask, "
      "Tensor? key_padding_mask, Tensor? dropout_seed, Tensor lse, *, float dropout_p, int causal, float? scale, "
      "int num_appended_keys, bool average, bool[6] output_mask",
      "(Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)");
  m.def(
      "paged_attention(Tensor query, Tensor key_pages, Tensor value_pages, Tensor page_table, Tensor key_range, "
      "Tensor? sink=None, *, float? scale=None, float softcap=0.0) -> (Tensor out, Tensor lse)",
      tags);
  m.def(
      "multi_head_attention(Tensor query, Tensor key, Tensor value, Tensor in_proj_weight, Tensor? in_proj_bias, "
      "Tensor out_proj_weight, Tensor? out_proj_bias, Tensor? attn_mask=None, Tensor? key_padding_mask=None, "
      "Tensor? dropout_seed=None, *, int num_heads, int num_kv_heads, int shared_inputs=0, bool batch_first=True, "
      "float dropout_p=0.0, int causal=0, float? scale=None, bool keep_rounding=False) "
      "-> (Tensor out, Tensor q, Tensor k, Tensor v, Tensor context, Tensor lse, Tensor rounding)",
      tags);
  m.def(
      "multi_head_attention_backward(Tensor grad_out, Tensor query, Tensor key, Tensor value, Tensor in_proj_weight, "
      "Tensor? in_proj_bias, Tensor out_proj_weight, Tensor? out_proj_bias, Tensor? attn_mask, "
      "Tensor? key_padding_mask, Tensor? dropout_seed, Tensor q, Tensor k, Tensor v, Tensor context, Tensor lse, "
      "Tensor rounding, *, "
      "int num_heads, int num_kv_heads, int shared_inputs, bool batch_first, float dropout_p, int causal, "
      "float? scale, bool[9] output_mask) "
      "-> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
      tags);
}

}  // namespace mha_ext
