#include "arguments.h"

#include <ATen/ops/clamp.h>
#include <ATen/ops/constant_pad_nd.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/isinf.h>
#include <ATen/ops/where.h>

#include <cmath>
#include <limits>

#include "dispatch.h"
#include "forward_into.h"
#include "parallel.h"
#include "schedule.h"

namespace mha_ext::cpu {
namespace {

using kernels::AttentionParams;
using kernels::ElementType;
using kernels::MaskKind;
using kernels::MaskView;

template <typename View, typename Data>
View make_view(const at::Tensor& t, Data* data) {
  View view;
  view.data = data;
  view.type = element_type(t.scalar_type());
  view.stride_b = t.stride(0);
  view.stride_h = t.stride(1);
  view.stride_t = t.stride(2);
  view.stride_d = t.stride(3);
  return view;
}

// `mask` is 4-D and broadcastable; axes of size 1 get stride 0.
MaskView mask_view(const at::Tensor& mask, bool true_hides) {
  const auto stride = [&](int64_t axis) { return mask.size(axis) == 1 ? 0 : mask.stride(axis); };
  MaskView view;
  view.data = mask.const_data_ptr();
  view.kind = mask.scalar_type() == at::kBool ? MaskKind::Bool : MaskKind::Float;
  view.true_hides = true_hides;
  view.stride_b = stride(0);
  view.stride_h = stride(1);
  view.stride_q = stride(2);
  view.stride_k = stride(3);
  return view;
}

// Only minus infinity hides a pair: a float64 number beyond float32's range becomes the nearest finite float32.
at::Tensor in_compute_type(const at::Tensor& mask, at::ScalarType type) {
  if (mask.scalar_type() == at::kBool) return mask;
  if (mask.scalar_type() != at::kDouble || type == at::kDouble) return mask.to(type);
  constexpr double kMax = std::numeric_limits<float>::max();
  return at::where(at::isinf(mask), mask, at::clamp(mask, -kMax, kMax)).to(type);
}

// The map of a bool mask that serves several heads, so that not each of them has to look at every pair.
at::Tensor make_mask_map(const at::Tensor& mask, const AttentionParams& p, MaskView& view) {
  const int64_t batch = mask.size(0), heads = mask.size(1), rows = mask.size(2), keys = mask.size(3);
  const bool shared = 2 * batch * heads <= p.batch * p.heads;
  if (view.kind != MaskKind::Bool || !shared || rows < kernels::kMapQueries || keys < kernels::kBlockKeys) return {};
  const int64_t map_rows = divide_up(rows, kernels::kMapQueries), tiles = divide_up(keys, kernels::kBlockKeys);
  const at::Tensor map = at::empty({batch, heads, map_rows, tiles}, mask.options().dtype(at::kByte));
  uint8_t* data = map.mutable_data_ptr<uint8_t>();
  const kernels::KernelTable& kernel = kernels_for(at::kFloat);
  const auto work = static_cast<double>(kernels::kMapQueries * keys);
  parallel_units(batch * heads * map_rows, work, 0, [&](int64_t unit, void*) {
    const int64_t row = unit % map_rows, head = unit / map_rows % heads, sample = unit / map_rows / heads;
    MaskView part = view;
    part.data = static_cast<const uint8_t*>(view.data) + sample * view.stride_b + head * view.stride_h +
                row * kernels::kMapQueries * view.stride_q;
    kernel.map_mask_rows(part, std::min(kernels::kMapQueries, rows - row * kernels::kMapQueries), keys,
                         data + unit * tiles);
  });
  view.map = data;
  view.map_stride_b = batch > 1 ? map.stride(0) : 0;
  view.map_stride_h = heads > 1 ? map.stride(1) : 0;
  view.map_stride_row = tiles;
  return map;
}

MaskView bias_view(const at::Tensor& turned, int64_t num_keys) {
  MaskView view;
  view.kind = MaskKind::Float;
  view.data = static_cast<const char*>(turned.const_data_ptr()) + (num_keys - 1) * turned.element_size();
  view.stride_b = turned.size(0) == 1 ? 0 : turned.stride(0);
  view.stride_h = turned.size(1) == 1 ? 0 : turned.stride(1);
  view.stride_q = 1;
  view.stride_k = -1;
  view.lanes_lie = true;
  return view;
}

// Causal order, window and ranges; see AttentionParams.
void bind_positions(const AttentionArguments& args, BoundArguments& bound) {
  AttentionParams& p = bound.params;
  const Variants& v = args.variants;
  const bool is_causal = args.causal == kUpperLeft || args.causal == kLowerRight;
  const bool lower_right = args.causal == kLowerRight || args.causal == kLowerRightPositions;
  const int64_t offset = lower_right ? p.num_keys - p.appended_keys - p.num_queries : 0;
  // A window's right side is a causal order further on. Limits beyond all keys would overflow sums.
  const int64_t farthest = p.num_keys + p.num_queries;
  p.causal = is_causal || v.window_right != kNoLimit;
  p.causal_offset = offset + (is_causal ? 0 : std::min(v.window_right, farthest));
  p.has_left = v.window_left != kNoLimit;
  p.left_offset = offset - std::min(v.window_left, farthest);
  if (!v.key_range.defined()) return;
  bound.key_range = v.key_range.contiguous();
  p.range_first = bound.key_range.const_data_ptr<int32_t>();
  p.range_last = p.range_first + bound.key_range.stride(0);
  p.range_stride_b = bound.key_range.size(1) == 1 ? 0 : bound.key_range.stride(1);
}

void bind_dropout(const AttentionArguments& args, BoundArguments& bound) {
  AttentionParams& p = bound.params;
  if (args.dropout_p <= 0.0) return;
  p.dropout = true;
  p.drop_below = static_cast<uint32_t>(std::min(std::floor(args.dropout_p * 4294967296.0), 4294967295.0));
  p.keep_scale = 1.0 / (1.0 - args.dropout_p);
  bound.dropout_seed = args.dropout_seed.contiguous();
  p.seeds = bound.dropout_seed.const_data_ptr<int64_t>();
  p.seed_samples = std::max<int64_t>(p.batch / bound.dropout_seed.numel(), 1);
}

}  // namespace

at::ScalarType compute_type(at::ScalarType type) { return type == at::kDouble ? at::kDouble : at::kFloat; }
at::ScalarType compute_type(const at::Tensor& query) { return compute_type(query.scalar_type()); }

kernels::ElementType element_type(at::ScalarType type) {
  switch (type) {
    case at::kDouble:
      return ElementType::Float64;
    case at::kFloat:
      return ElementType::Float32;
    case at::kBFloat16:
      return ElementType::BFloat16;
    case at::kHalf:
      return ElementType::Float16;
    default:
      TORCH_CHECK_TYPE(false, "attention: dtype must be float64, float32, bfloat16 or float16, got ", type);
  }
}

const kernels::KernelTable& kernels_for(at::ScalarType tensors) {
  const kernels::InstructionSet& set = instruction_set();
  if (tensors == at::kBFloat16 && set.bfloat16 != nullptr) return *set.bfloat16;
  return tensors == at::kDouble ? set.float64 : set.float32;
}

// Products of bfloat16 are scaled after they are made: a scale that far from 1 may be there to keep them in range.
const kernels::KernelTable& kernels_for(const AttentionArguments& args) {
  constexpr double kMostScale = 1 << 20;
  const double scale = std::abs(args.scale.value_or(1.0));
  const bool usual = scale <= kMostScale && scale >= 1 / kMostScale;
  const at::ScalarType type = args.query.scalar_type();
  return kernels_for(usual ? type : compute_type(type));
}

kernels::TensorView view_of(const at::Tensor& t) { return make_view<kernels::TensorView>(t, t.const_data_ptr()); }

kernels::MutableTensorView mutable_view_of(const at::Tensor& t) {
  return make_view<kernels::MutableTensorView>(t, t.mutable_data_ptr());
}

at::Tensor turned_bias(const at::Tensor& bias, at::ScalarType type) {
  return at::constant_pad_nd(in_compute_type(bias, type).flip(-1), {0, kernels::kMapQueries}).contiguous();
}

BoundArguments bind(const AttentionArguments& args) {
  const at::ScalarType compute = compute_type(args.query);
  BoundArguments bound;
  AttentionParams& p = bound.params;
  p.query = view_of(args.query);
  p.key = view_of(args.key);
  if (args.value.defined()) p.value = view_of(args.value);
  p.batch = args.query.size(0);
  p.heads = args.query.size(1);
  p.kv_heads = args.key.size(1);
  p.num_queries = args.query.size(2);
  p.num_keys = args.key.size(2);
  p.head_dim = args.query.size(3);
  p.value_dim = args.value.defined() ? args.value.size(3) : 0;
  p.appended_keys = args.num_appended_keys;
  bind_positions(args, bound);
  p.scale = args.scale.value_or(1.0 / std::sqrt(static_cast<double>(p.head_dim)));
  p.query_block = query_block_size(p.num_queries, kernels_for(args).vector_width, kernels::kBlockQueries);
  bind_dropout(args, bound);
  if (args.attn_mask.defined()) {
    bound.attn_mask = in_compute_type(args.attn_mask, compute);
    p.masks[0] = mask_view(bound.attn_mask, /*true_hides=*/false);
    bound.mask_map = make_mask_map(bound.attn_mask, p, p.masks[0]);
  }
  if (args.key_padding_mask.defined()) {
    bound.key_padding_mask = in_compute_type(args.key_padding_mask, compute).unsqueeze(1).unsqueeze(1);
    p.masks[1] = mask_view(bound.key_padding_mask, /*true_hides=*/true);
  }
  if (args.variants.relative_bias.defined()) {
    bound.relative_bias = turned_bias(args.variants.relative_bias, compute);
    p.masks[2] = bias_view(bound.relative_bias, p.num_keys - p.appended_keys);
  }
  if (args.variants.sink.defined()) {
    bound.sink = sink_in(args, compute).contiguous();
    p.sink = bound.sink.const_data_ptr();
    p.sink_stride_b = bound.sink.dim() == 2 ? p.heads : 0;
  }
  p.softcap = softcap_of(args);
  return bound;
}

kernels::ForwardParams bind_outputs(const BoundArguments& bound, const OutputTargets& targets) {
  kernels::ForwardParams forward;
  forward.attention = bound.params;
  forward.out = mutable_view_of(targets.out);
  if (targets.rounding.defined() && targets.rounding.dim() == 4) forward.rounding = mutable_view_of(targets.rounding);
  return forward;
}

}  // namespace mha_ext::cpu
