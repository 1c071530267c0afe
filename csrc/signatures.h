// The operators' C++ signatures, each spelled once: a template turns a function on the argument structs into a kernel
// that the dispatcher can register, and gives the typed callers their type.
#pragma once

#include "attention.h"

namespace mha_ext {

inline Variants make_variants(const OptionalTensor& key_range, const OptionalTensor& relative_bias,
                              const OptionalTensor& sink, int64_t window_left, int64_t window_right, double softcap) {
  return {
      from_optional(key_range), from_optional(relative_bias), from_optional(sink), window_left, window_right, softcap};
}

template <auto kFunction>
AttentionResult attention_kernel(const at::Tensor& query, const at::Tensor& key, const at::Tensor& value,
                                 const OptionalTensor& attn_mask, const OptionalTensor& key_padding_mask,
                                 const OptionalTensor& dropout_seed, double dropout_p, int64_t causal,
                                 std::optional<double> scale, int64_t num_appended_keys,
                                 const OptionalTensor& key_range, const OptionalTensor& relative_bias,
                                 const OptionalTensor& sink, int64_t window_left, int64_t window_right,
                                 double softcap) {
  return kFunction(
      AttentionArguments{query, key, value, from_optional(attn_mask), from_optional(key_padding_mask),
                         from_optional(dropout_seed), dropout_p, causal, scale, num_appended_keys,
                         make_variants(key_range, relative_bias, sink, window_left, window_right, softcap)});
}

template <auto kFunction>
AttentionGradients attention_backward_kernel(
    const OptionalTensor& grad_out, const OptionalTensor& grad_lse, const at::Tensor& query, const at::Tensor& key,
    const at::Tensor& value, const OptionalTensor& attn_mask, const OptionalTensor& key_padding_mask,
    const OptionalTensor& dropout_seed, const at::Tensor& out, const at::Tensor& lse, double dropout_p, int64_t causal,
    std::optional<double> scale, int64_t num_appended_keys, std::array<bool, kNumGradients> output_mask,
    const OptionalTensor& rounding, const OptionalTensor& key_range, const OptionalTensor& relative_bias,
    const OptionalTensor& sink, int64_t window_left, int64_t window_right, double softcap) {
  return kFunction(
      AttentionArguments{query, key, value, from_optional(attn_mask), from_optional(key_padding_mask),
                         from_optional(dropout_seed), dropout_p, causal, scale, num_appended_keys,
                         make_variants(key_range, relative_bias, sink, window_left, window_right, softcap)},
      AttentionCotangents{from_optional(grad_out), from_optional(grad_lse), out, lse, output_mask,
                          from_optional(rounding)});
}

template <auto kFunction>
AttentionResult attention_jvp_kernel(const at::Tensor& query, const at::Tensor& key, const at::Tensor& value,
                                     const OptionalTensor& attn_mask, const OptionalTensor& key_padding_mask,
                                     const OptionalTensor& dropout_seed, const at::Tensor& out, const at::Tensor& lse,
                                     const OptionalTensor& query_tangent, const OptionalTensor& key_tangent,
                                     const OptionalTensor& value_tangent, const OptionalTensor& attn_mask_tangent,
                                     const OptionalTensor& key_padding_mask_tangent,
                                     const OptionalTensor& relative_bias_tangent, const OptionalTensor& sink_tangent,
                                     double dropout_p, int64_t causal, std::optional<double> scale,
                                     int64_t num_appended_keys, const OptionalTensor& rounding,
                                     const OptionalTensor& key_range, const OptionalTensor& relative_bias,
                                     const OptionalTensor& sink, int64_t window_left, int64_t window_right,
                                     double softcap) {
  return kFunction(
      AttentionArguments{query, key, value, from_optional(attn_mask), from_optional(key_padding_mask),
                         from_optional(dropout_seed), dropout_p, causal, scale, num_appended_keys,
                         make_variants(key_range, relative_bias, sink, window_left, window_right, softcap)},
      ForwardTangents{out, lse,
                      Tangents{from_optional(query_tangent), from_optional(key_tangent), from_optional(value_tangent),
                               from_optional(attn_mask_tangent), from_optional(key_padding_mask_tangent),
                               from_optional(relative_bias_tangent), from_optional(sink_tangent)},
                      from_optional(rounding)});
}

template <auto kFunction>
SecondGradients attention_backward_jvp_kernel(
    const OptionalTensor& grad_out, const OptionalTensor& grad_lse, const at::Tensor& query, const at::Tensor& key,
    const at::Tensor& value, const OptionalTensor& attn_mask, const OptionalTensor& key_padding_mask,
    const OptionalTensor& dropout_seed, const at::Tensor& out, const at::Tensor& lse,
    const OptionalTensor& query_tangent, const OptionalTensor& key_tangent, const OptionalTensor& value_tangent,
    const OptionalTensor& attn_mask_tangent, const OptionalTensor& key_padding_mask_tangent,
    const OptionalTensor& relative_bias_tangent, const OptionalTensor& sink_tangent,
    const OptionalTensor& grad_out_tangent, const OptionalTensor& grad_lse_tangent, double dropout_p, int64_t causal,
    std::optional<double> scale, int64_t num_appended_keys, std::array<bool, kNumSecondGradients> output_mask,
    const OptionalTensor& rounding, const OptionalTensor& key_range, const OptionalTensor& relative_bias,
    const OptionalTensor& sink, int64_t window_left, int64_t window_right, double softcap) {
  return kFunction(
      AttentionArguments{query, key, value, from_optional(attn_mask), from_optional(key_padding_mask),
                         from_optional(dropout_seed), dropout_p, causal, scale, num_appended_keys,
                         make_variants(key_range, relative_bias, sink, window_left, window_right, softcap)},
      BackwardTangents{{from_optional(grad_out), from_optional(grad_lse), out, lse, {}, from_optional(rounding)},
                       Tangents{from_optional(query_tangent), from_optional(key_tangent), from_optional(value_tangent),
                                from_optional(attn_mask_tangent), from_optional(key_padding_mask_tangent),
                                from_optional(relative_bias_tangent), from_optional(sink_tangent)},
                       from_optional(grad_out_tangent),
                       from_optional(grad_lse_tangent),
                       output_mask});
}

template <auto kFunction>
WeightsResult attention_with_weights_kernel(const at::Tensor& query, const at::Tensor& key, const at::Tensor& value,
                                            const OptionalTensor& attn_mask, const OptionalTensor& key_padding_mask,
                                            const OptionalTensor& dropout_seed, double dropout_p, int64_t causal,
                                            std::optional<double> scale, int64_t num_appended_keys, bool average,
                                            const OptionalTensor& key_range, const OptionalTensor& relative_bias,
                                            const OptionalTensor& sink, int64_t window_left, int64_t window_right,
                                            double softcap) {
  return kFunction(
      AttentionArguments{query, key, value, from_optional(attn_mask), from_optional(key_padding_mask),
                         from_optional(dropout_seed), dropout_p, causal, scale, num_appended_keys,
                         make_variants(key_range, relative_bias, sink, window_left, window_right, softcap)},
      average);
}

template <auto kFunction>
ForBackwardResult attention_for_backward_kernel(const at::Tensor& query, const at::Tensor& key, const at::Tensor& value,
                                                const OptionalTensor& attn_mask, const OptionalTensor& key_padding_mask,
                                                const OptionalTensor& dropout_seed, double dropout_p, int64_t causal,
                                                std::optional<double> scale, int64_t num_appended_keys, int64_t weights,
                                                const OptionalTensor& key_range, const OptionalTensor& relative_bias,
                                                const OptionalTensor& sink, int64_t window_left, int64_t window_right,
                                                double softcap) {
  return kFunction(
      AttentionArguments{query, key, value, from_optional(attn_mask), from_optional(key_padding_mask),
                         from_optional(dropout_seed), dropout_p, causal, scale, num_appended_keys,
                         make_variants(key_range, relative_bias, sink, window_left, window_right, softcap)},
      weights);
}

template <auto kFunction>
WeightsGradients attention_weights_backward_kernel(
    const at::Tensor& grad_weights, const at::Tensor& query, const at::Tensor& key, const OptionalTensor& attn_mask,
    const OptionalTensor& key_padding_mask, const OptionalTensor& dropout_seed, const at::Tensor& lse, double dropout_p,
    int64_t causal, std::optional<double> scale, int64_t num_appended_keys, bool average,
    std::array<bool, kNumWeightsGradients> output_mask, const OptionalTensor& key_range,
    const OptionalTensor& relative_bias, const OptionalTensor& sink, int64_t window_left, int64_t window_right,
    double softcap) {
  return kFunction(
      AttentionArguments{query, key, at::Tensor(), from_optional(attn_mask), from_optional(key_padding_mask),
                         from_optional(dropout_seed), dropout_p, causal, scale, num_appended_keys,
                         make_variants(key_range, relative_bias, sink, window_left, window_right, softcap)},
      WeightsCotangents{grad_weights, lse, average, output_mask});
}

template <auto kFunction>
AttentionResult paged_attention_kernel(const at::Tensor& query, const at::Tensor& key_pages,
                                       const at::Tensor& value_pages, const at::Tensor& page_table,
                                       const at::Tensor& key_range, const OptionalTensor& sink,
                                       std::optional<double> scale, double softcap) {
  return kFunction(
      PagedArguments{query, key_pages, value_pages, page_table, key_range, from_optional(sink), scale, softcap});
}

template <auto kFunction>
LayerResult multi_head_attention_kernel(const at::Tensor& query, const at::Tensor& key, const at::Tensor& value,
                                        const at::Tensor& in_proj_weight, const OptionalTensor& in_proj_bias,
                                        const at::Tensor& out_proj_weight, const OptionalTensor& out_proj_bias,
                                        const OptionalTensor& attn_mask, const OptionalTensor& key_padding_mask,
                                        const OptionalTensor& dropout_seed, int64_t num_heads, int64_t num_kv_heads,
                                        int64_t shared_inputs, bool batch_first, double dropout_p, int64_t causal,
                                        std::optional<double> scale, bool keep_rounding) {
  return kFunction(LayerArguments{query, key, value, in_proj_weight, from_optional(in_proj_bias), out_proj_weight,
                                  from_optional(out_proj_bias), from_optional(attn_mask),
                                  from_optional(key_padding_mask), from_optional(dropout_seed), num_heads, num_kv_heads,
                                  shared_inputs, batch_first, dropout_p, causal, scale, keep_rounding});
}

template <auto kFunction>
LayerGradients multi_head_attention_backward_kernel(
    const at::Tensor& grad_out, const at::Tensor& query, const at::Tensor& key, const at::Tensor& value,
    const at::Tensor& in_proj_weight, const OptionalTensor& in_proj_bias, const at::Tensor& out_proj_weight,
    const OptionalTensor& out_proj_bias, const OptionalTensor& attn_mask, const OptionalTensor& key_padding_mask,
    const OptionalTensor& dropout_seed, const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
    const at::Tensor& context, const at::Tensor& lse, const at::Tensor& rounding, int64_t num_heads,
    int64_t num_kv_heads, int64_t shared_inputs, bool batch_first, double dropout_p, int64_t causal,
    std::optional<double> scale, std::array<bool, kNumLayerGradients> output_mask) {
  return kFunction(LayerArguments{query, key, value, in_proj_weight, from_optional(in_proj_bias), out_proj_weight,
                                  from_optional(out_proj_bias), from_optional(attn_mask),
                                  from_optional(key_padding_mask), from_optional(dropout_seed), num_heads, num_kv_heads,
                                  shared_inputs, batch_first, dropout_p, causal, scale},
                   LayerCotangents{grad_out, LayerState{q, k, v, context, lse, rounding}, output_mask});
}

}  // namespace mha_ext
