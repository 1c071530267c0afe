// What a kernel is given: raw pointers, strides and sizes. No torch, no std containers: this header is included by
// objects compiled for newer processors than the one that may run the rest of the library.
#pragma once

#include <stddef.h>
#include <stdint.h>

namespace mha_ext::kernels {

enum class ElementType : int32_t { Float64, Float32, BFloat16, Float16 };

// A (B, H, T, D) tensor in any layout; strides are in elements and may be zero or negative.
struct TensorView {
  const void* data = nullptr;
  ElementType type = ElementType::Float32;
  int64_t stride_b = 0, stride_h = 0, stride_t = 0, stride_d = 0;
};

struct MutableTensorView {
  void* data = nullptr;
  ElementType type = ElementType::Float32;
  int64_t stride_b = 0, stride_h = 0, stride_t = 0, stride_d = 0;
};

enum class MaskKind : int32_t { None, Bool, Float };

// A mask over (B, H, T_q, T_kv - appended_keys), broadcast by zero strides. A Float mask has the kernel's compute type
// (float or double) and is added to the scores; minus infinity in it hides the pair. A Bool mask is one byte an entry:
// nonzero shows the pair, or hides it when `true_hides`.
struct MaskView {
  const void* data = nullptr;
  MaskKind kind = MaskKind::None;
  bool true_hides = false;
  int64_t stride_b = 0, stride_h = 0, stride_q = 0, stride_k = 0;
  const uint8_t* map = nullptr;  // of a Bool mask, or null: what map_mask_rows found, [row of the map][tile of keys]
  int64_t map_stride_b = 0, map_stride_h = 0, map_stride_row = 0;
  bool lanes_lie = false;  // stride_q is 1, and a whole vector may be read beyond the last query
};

// A row of a mask's map stands for kMapQueries queries, an entry for a tile of keys. Bit i of its lower half: among the
// i-th kMapKeys keys there are hidden pairs; of its upper half: there are visible ones.
constexpr int64_t kMapQueries = 16, kMapKeys = 16;
constexpr uint8_t kMapHidden = 1, kMapVisible = 16, kMapAllHidden = 15, kMapAllVisible = 240;

// Edges of a score tile. Queries are spread evenly over blocks of at most kBlockQueries; see schedule.h. 128 queries
// against 64: 3 to 5 % at T = 128 ... 512, as K, V and masks are read half as often.
constexpr int64_t kBlockQueries = 128;
constexpr int64_t kBlockKeys = 64;

constexpr int kMaxMasks = 3;  // attn_mask, key_padding_mask and the relative bias

// Everything forward and backward share. Query head h reads key/value head h / (heads / kv_heads).
struct AttentionParams {
  TensorView query, key, value;
  MaskView masks[kMaxMasks];
  int64_t batch = 0, heads = 0, kv_heads = 0;
  int64_t num_queries = 0, num_keys = 0, head_dim = 0, value_dim = 0;
  int64_t appended_keys = 0;  // the last keys, which every query sees
  bool causal = false;
  int64_t causal_offset = 0;  // causal: key j is visible to query i when j <= i + causal_offset
  bool has_left = false;
  int64_t left_offset = 0;  // has_left: key j is visible to query i when j >= i + left_offset
  // Unless null: query i of sample b sees keys [range_first[b * range_stride_b + i], range_last[...]) only.
  const int32_t *range_first = nullptr, *range_last = nullptr;
  int64_t range_stride_b = 0;
  const void* sink = nullptr;  // a logit a head in every row's softmax, in the compute type; or null
  int64_t sink_stride_b = 0;
  double softcap = 0.0;                 // when positive, scores become softcap tanh(score / softcap)
  int64_t query_block = kBlockQueries;  // queries a block, at most kBlockQueries
  double scale = 1.0;
  bool dropout = false;
  uint32_t drop_below = 0;         // a pair is kept when its hash is >= drop_below
  double keep_scale = 1.0;         // 1 / (1 - dropout_p)
  const int64_t* seeds = nullptr;  // one for each `seed_samples` samples, which count from its first
  int64_t seed_samples = 1;
  // Unless null, for few queries only: key and value are (pages, H_kv, page_size, D), and keys j of sample b lie in
  // page pages[b * pages_stride_b + j / page_size].
  const int32_t* pages = nullptr;
  int64_t pages_stride_b = 0, page_size = 0;
};

// out (B, H, T_q, D_v) and lse (B, H, T_q) contiguous, in the compute type. Rows with no visible key: out 0, lse -inf.
// `rounding`, unless its data is null, is bfloat16 of out's shape and gets what rounding to out's type took from it.
struct ForwardParams {
  AttentionParams attention;
  MutableTensorView out, rounding;
  void* lse = nullptr;
  // Few queries: what ranges of `range_keys` keys leave until they are merged; null when there is one range.
  void* partial = nullptr;
  int64_t range_keys = 0;
};

// Gradients whose data pointer is null are not written. `grad_out.data` and `grad_lse` may be null (zero).
// With `grad_weights.data` the gradient is that of the returned weights instead: (B, H, T_q, T_kv) with stride_h 0 for
// weights averaged over heads, times `weights_factor`; value, out, grad_out and grad_lse are not read then.
// Keys come in ranges of `range_keys`, whose shares of dQ are added in order. `grad_query_shares`, when set, receives
// each range's share before it is scaled, in the compute type as [range][B][H][T_q][D], instead of `grad_query` their
// sum.
// `rounding`, unless its data is null, is what the forward pass left there: without it delta = rowsum(dO O) is off by a
// rounding of O, which is most of dS in a row that attends to nearly one key alone.
struct BackwardParams {
  AttentionParams attention;
  TensorView out, rounding, grad_out;
  TensorView grad_weights;
  double weights_factor = 1.0;
  const void* lse = nullptr;
  const void* grad_lse = nullptr;
  MutableTensorView grad_query, grad_key, grad_value;
  void* grad_query_shares = nullptr;
  int64_t range_keys = 0;  // a multiple of kBlockKeys
};

// Tangents of what forward and backward read; those whose data is null are zero. In `backward`, the gradients are those
// whose tangents are wanted, and the targets are the tangents'.
struct TangentParams {
  BackwardParams backward;
  TensorView query, key, value, grad_out;
  AttentionParams mask_tangents;  // of the float masks, in their places, and nothing else that hides or shows a pair
  const void* sink_tangent = nullptr;  // lies as the sink
  MutableTensorView moved_out;         // of out; its type is the compute type or the tensors'
  void* moved_lse = nullptr;           // of lse, (B, H, T_q) in the compute type: written by the first pass
  const void* moved_delta = nullptr;   // of delta, likewise
};

// Forward with the weights after dropout, summed over `head_count` heads from the block's head on and times `factor`:
// rows of `weights` are queries, and its stride_h serves weights given per head.
struct WeightsParams {
  ForwardParams forward;
  MutableTensorView weights;
  int64_t head_count = 1;
  double factor = 1.0;
};

// Where the gradient of a float mask is added: (B or 1, H or 1, T_q or 1, T_kv or 1) in the compute type, broadcast
// axes having stride zero. A relative bias' queries have stride 1 and its keys stride -1.
struct MaskGradientView {
  void* data = nullptr;
  int64_t stride_b = 0, stride_h = 0, stride_q = 0, stride_k = 0;
};

struct QueryBlock {
  int64_t batch, head, begin, count;  // count <= kBlockQueries
};

// Rows of a group of heads that share a key/value head: row = head in the group * num_queries + query.
struct GroupRows {
  int64_t begin, count;
};

struct KeyRange {
  int64_t batch, kv_head, begin, end;
};

}  // namespace mha_ext::kernels
