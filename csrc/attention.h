// The operators as C++ functions: what they take (one struct for attention, one for the whole layer) and one typed
// caller each. A caller goes through the dispatcher, so autograd, autocast and the device's kernel all take part.
//
// B batch, H query heads, H_kv key/value heads (H_kv divides H), T_q and T_kv lengths, D and D_v head widths.
#pragma once

#include <ATen/core/Tensor.h>

#include <array>
#include <cstdint>
#include <optional>
#include <tuple>

namespace mha_ext {

using OptionalTensor = std::optional<at::Tensor>;

inline OptionalTensor to_optional(const at::Tensor& tensor) {
  return tensor.defined() ? OptionalTensor(tensor) : std::nullopt;
}

inline at::Tensor from_optional(const OptionalTensor& tensor) { return tensor.has_value() ? *tensor : at::Tensor(); }

enum Causal : int64_t {
  kNotCausal = 0,
  kUpperLeft = 1,   // key j is visible to query i iff j <= i
  kLowerRight = 2,  // key j is visible to query i iff j <= i + T_kv - num_appended_keys - T_q
  kLowerRightPositions =
      3,  // every key is visible; a window counts from i + T_kv - num_appended_keys - T_q, not from i
};

constexpr int64_t kNoLimit = -1;

// What today's models add to scaled dot-product attention. Keys and lengths are those without appended keys.
struct Variants {
  at::Tensor key_range;      // int32 (2, B or 1, T_q): query i sees only keys [range[0], range[1])
  at::Tensor relative_bias;  // (B or 1, H or 1, T_q + T_kv - 1): entry T_q - 1 + j - i is added to the score of (i, j)
  at::Tensor sink;           // (H) or (B, H): one more logit in every row's softmax, which has no value
  int64_t window_left = kNoLimit;   // query i sees no key before its own position less so many,
  int64_t window_right = kNoLimit;  // and none behind it plus so many
  double softcap = 0.0;  // when positive, scores become softcap tanh(score / softcap) before anything is added
};

// A tensor that is absent is an undefined tensor.
struct AttentionArguments {
  at::Tensor query;      // (B, H, T_q, D)
  at::Tensor key;        // (B, H_kv, T_kv, D)
  at::Tensor value;      // (B, H_kv, T_kv, D_v); absent for the gradient of the attention weights
  at::Tensor attn_mask;  // broadcasts to (B, H, T_q, T_kv - num_appended_keys); bool: True = may attend; else added
  at::Tensor key_padding_mask;  // (B or 1, T_kv - num_appended_keys); bool: True = ignore; else added
  at::Tensor dropout_seed;      // int64, present iff dropout_p > 0: one element, or K of them that serve B / K samples
                                // each, in order, which then count from their seed's first (vmap's randomness)
  double dropout_p = 0.0;
  int64_t causal = kNotCausal;
  std::optional<double> scale = std::nullopt;  // 1 / sqrt(D) when absent
  int64_t num_appended_keys = 0;               // the last keys, which every query sees: no mask applies to them
  Variants variants = {};
};

using AttentionResult = std::tuple<at::Tensor, at::Tensor>;            // out, lse
using WeightsResult = std::tuple<at::Tensor, at::Tensor, at::Tensor>;  // out, lse, weights
// Of query, key, value, attn_mask, key_padding_mask, relative_bias, sink.
constexpr size_t kNumGradients = 7;
// Directions in which those move, in that order; an undefined one counts as zero.
using Tangents = std::array<at::Tensor, kNumGradients>;
using AttentionGradients =
    std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor, at::Tensor, at::Tensor, at::Tensor>;
// Of query, key, attn_mask, key_padding_mask, relative_bias, sink.
constexpr size_t kNumWeightsGradients = 6;
using WeightsGradients = std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor, at::Tensor, at::Tensor>;

// out (B, H, T_q, D_v), its axes lying in the order of query's (layout.h); lse (B, H, T_q), -inf for a query that sees
// no key.
AttentionResult call_attention(const AttentionArguments& arguments);

// What the backward operators take besides the forward's arguments. Undefined gradients count as zero.
struct AttentionCotangents {
  at::Tensor grad_out;
  at::Tensor grad_lse;
  at::Tensor out;
  at::Tensor lse;
  std::array<bool, kNumGradients> output_mask;
  at::Tensor rounding = {};  // as ForBackwardResult has it; absent or empty: out is taken as it is
};
AttentionGradients call_attention_backward(const AttentionArguments& arguments, const AttentionCotangents& cotangents);

// First derivative along tangents: of the forward's results, where they are known,
struct ForwardTangents {
  at::Tensor out;
  at::Tensor lse;
  Tangents inputs;
  at::Tensor rounding = {};  // as in AttentionCotangents
};
AttentionResult call_attention_jvp(const AttentionArguments& arguments, const ForwardTangents& tangents);

// and of the backward's gradients, out and lse being functions of the inputs. With tangents of the inputs alone this is
// the product with the second derivative of <grad_out, out> + <grad_lse, lse>, and so, as that is symmetric, also the
// backward of the backward: its results are the gradients of the backward's arguments, in the order of kNumGradients,
// grad_out and grad_lse last (whose own are the tangents of out and lse).
constexpr size_t kNumSecondGradients = kNumGradients + 2;
using SecondGradients = std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor, at::Tensor, at::Tensor, at::Tensor,
                                   at::Tensor, at::Tensor>;
struct BackwardTangents {
  AttentionCotangents cotangents;  // its output_mask is not read
  Tangents inputs;
  at::Tensor grad_out, grad_lse;
  std::array<bool, kNumSecondGradients> output_mask;
};
SecondGradients call_attention_backward_jvp(const AttentionArguments& arguments, const BackwardTangents& tangents);

// The same with the weights that were used, after dropout: (B, H, T_q, T_kv), or their mean over heads (B, T_q, T_kv).
WeightsResult call_attention_with_weights(const AttentionArguments& arguments, bool average);

enum Weights : int64_t { kNoWeights = 0, kMeanWeights = 1, kWeightsPerHead = 2 };

// What an autograd node keeps of bfloat16 and float16: out, lse and weights (empty if not asked for) as above, and what
// rounding took from out, in bfloat16, lying like it (empty for other types).
using ForBackwardResult = std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor>;
ForBackwardResult call_attention_for_backward(const AttentionArguments& arguments, int64_t weights);

// The softcap as arithmetic of the compute type can have it: beyond these limits it means no cap, or scores of 0.
double softcap_of(const AttentionArguments& arguments);

// The sink in the compute type; infinity, or a number beyond, is the largest one: nothing else has a part of the row
// then.
at::Tensor sink_in(const AttentionArguments& arguments, at::ScalarType type);

// exp(sink - lse), (B, H, T_q): the part of each row that such a sink has; 0 where a query sees no key.
at::Tensor sink_share(const at::Tensor& sink, const at::Tensor& lse);

// The axes of (B, H, T_q) that its gradient sums over.
inline at::IntArrayRef sink_rows(const at::Tensor& sink) {
  static constexpr std::array<int64_t, 2> kAxes{2, 0};
  return at::IntArrayRef(kAxes.data(), sink.dim() == 1 ? 2 : 1);
}

inline bool is_half(const at::Tensor& tensor) {
  return tensor.scalar_type() == at::kBFloat16 || tensor.scalar_type() == at::kHalf;
}

// What the backward of the weights takes besides query, key, masks and numbers; the output's has an operator above.

// Keys and values where a cache of pages holds them (Kwon et al. 2023), for few queries; without derivatives.
struct PagedArguments {
  at::Tensor query;        // (B, H, T_q, D)
  at::Tensor key_pages;    // (pages, H_kv, page size, D)
  at::Tensor value_pages;  // (pages, H_kv, page size, D_v)
  at::Tensor page_table;   // int32 (B, at most so many pages): key j of sample b is in page_table[b][j / page size]
  at::Tensor key_range;    // as in Variants
  at::Tensor sink;         // as in Variants
  std::optional<double> scale = std::nullopt;
  double softcap = 0.0;
};

// The same with other keys and values: those of the pages gathered into (B, H_kv, T_kv, X), or the pages themselves.
AttentionArguments on_keys(const PagedArguments& arguments, const at::Tensor& key, const at::Tensor& value);
at::Tensor gather_pages(const at::Tensor& pages, const at::Tensor& page_table);

AttentionResult call_paged_attention(const PagedArguments& arguments);

struct WeightsCotangents {
  at::Tensor grad_weights;
  at::Tensor lse;
  bool average;
  std::array<bool, kNumWeightsGradients> output_mask;
};
WeightsGradients call_attention_weights_backward(const AttentionArguments& arguments,
                                                 const WeightsCotangents& cotangents);

enum SharedInputs : int64_t {
  kSeparateInputs = 0,
  kSharedKeyValue = 1,  // key is value: one product for both; their gradient goes to `key`
  kSharedAll = 2,       // query is key is value: one product; the gradient goes to `query`
};

// E is the inputs' width, E_out the output's. Rows of in_proj_weight: H * D of query, H_kv * D of key, of value.
struct LayerArguments {
  at::Tensor query;            // (B, T_q, E), or (T_q, B, E) unless batch_first
  at::Tensor key;              // (B, T_kv, E), or (T_kv, B, E)
  at::Tensor value;            // as key
  at::Tensor in_proj_weight;   // ((H + 2 H_kv) * D, E)
  at::Tensor in_proj_bias;     // ((H + 2 H_kv) * D,), may be absent
  at::Tensor out_proj_weight;  // (E_out, H * D)
  at::Tensor out_proj_bias;    // (E_out,), may be absent
  at::Tensor attn_mask;        // these three as in AttentionArguments
  at::Tensor key_padding_mask;
  at::Tensor dropout_seed;
  int64_t num_heads = 1;
  int64_t num_kv_heads = 1;
  int64_t shared_inputs = kSeparateInputs;
  bool batch_first = true;
  double dropout_p = 0.0;
  int64_t causal = kNotCausal;
  std::optional<double> scale = std::nullopt;
  bool keep_rounding = false;
};

// What the layer's backward reads: the projections as they were computed (one buffer for inputs that are shared, the
// others empty), the heads' outputs side by side, the log-sum-exp, and what rounding took from those outputs (empty
// unless it was asked for, and for other types than bfloat16 and float16).
struct LayerState {
  at::Tensor q;
  at::Tensor k;
  at::Tensor v;
  at::Tensor context;
  at::Tensor lse;
  at::Tensor rounding;
};

using LayerResult = std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor, at::Tensor, at::Tensor, at::Tensor>;
using LayerGradients = std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor, at::Tensor, at::Tensor, at::Tensor,
                                  at::Tensor, at::Tensor>;
constexpr size_t kNumLayerGradients = 9;  // query to out_proj_bias, attn_mask, key_padding_mask

struct LayerCotangents {
  at::Tensor grad_out;
  LayerState state;
  std::array<bool, kNumLayerGradients> output_mask;
};

// out (B, T_q, E_out) or (T_q, B, E_out), then the members of LayerState.
LayerResult call_multi_head_attention(const LayerArguments& arguments);
LayerGradients call_multi_head_attention_backward(const LayerArguments& arguments, const LayerCotangents& cotangents);

// An attention weight is kept iff its 32-bit hash is at least this.
inline uint32_t dropout_threshold(double dropout_p) { return static_cast<uint32_t>(dropout_p * 4294967296.0); }

}  // namespace mha_ext
