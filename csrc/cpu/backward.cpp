#include "backward.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>

#include "parallel.h"

namespace mha_ext::cpu {
namespace {

using kernels::AttentionParams;
using kernels::BackwardParams;
using kernels::KernelTable;

double multiply_adds(const AttentionParams& p, int64_t queries, int64_t keys) {
  return static_cast<double>(queries) * static_cast<double>(keys) * static_cast<double>(p.head_dim + p.value_dim) * 2.5;
}

// Which kernels give the gradients: the backward's, or those of their tangents.
struct Pass {
  BackwardParams& b;
  const kernels::TangentParams* tangents;  // b is theirs; null in a plain backward
  const AttentionArguments& args;
  const KernelTable& kernel;

  void run(const kernels::KeyRange& keys, void* scratch) const {
    tangents != nullptr ? kernel.tangent_backward_range(*tangents, keys, scratch)
                        : kernel.backward_range(b, keys, scratch);
  }
  size_t scratch_bytes(int64_t range_keys) const {
    return tangents != nullptr ? kernel.tangent_backward_scratch_bytes(b.attention, range_keys)
                               : kernel.backward_scratch_bytes(b.attention, range_keys);
  }
  void add_mask_gradient(const kernels::QueryBlock& block, const kernels::KeyRange& keys,
                         const kernels::MaskGradientView& view, void* scratch) const {
    tangents != nullptr ? kernel.tangent_mask_gradient_block(*tangents, block, keys.begin, keys.end, view, scratch)
                        : kernel.mask_gradient_block(b, block, keys.begin, keys.end, view, scratch);
  }
  size_t mask_scratch_bytes() const {
    return tangents != nullptr ? kernel.tangent_backward_scratch_bytes(b.attention, 0)
                               : kernel.mask_gradient_scratch_bytes(b.attention);
  }
};

// The target if there is one, else (B, H, T, D)-shaped, lying as (B, T, H, D).
at::Tensor gradient_for(bool wanted, const at::Tensor& t, const at::Tensor& target) {
  if (!wanted || target.defined()) return target;
  return at::empty({t.size(0), t.size(2), t.size(1), t.size(3)}, t.options()).transpose(1, 2);
}

// dQ, dK, dV. A unit is a key/value head, or one of its ranges of keys: each then leaves its share of dQ apart.
void input_gradients(const Pass& pass, const at::Tensor& grad_query) {
  BackwardParams& b = pass.b;
  const AttentionParams& p = b.attention;
  const KernelTable& kernel = pass.kernel;
  const bool few = runs_as_few(p.num_queries, kernel) && b.grad_weights.data == nullptr && pass.tangents == nullptr;
  b.range_keys = few ? few_range_size(p.num_keys) : key_range_size(p.heads, p.kv_heads, p.num_keys);
  const bool apart = few || splits_heads(p.batch * p.kv_heads, thread_count());
  const int64_t range = apart ? b.range_keys : p.num_keys;
  const int64_t ranges = divide_up(p.num_keys, range);
  at::Tensor shares;
  if (ranges > 1 && grad_query.defined()) {
    shares = at::empty({ranges, p.batch, p.heads, p.num_queries, p.head_dim},
                       grad_query.options().dtype(compute_type(pass.args.query)));
    b.grad_query_shares = shares.mutable_data_ptr();
  }
  const double work = multiply_adds(p, p.num_queries * (p.heads / p.kv_heads), range);
  const size_t bytes = few ? kernel.backward_few_scratch_bytes(p) : pass.scratch_bytes(std::min(range, p.num_keys));
  parallel_units(p.batch * p.kv_heads * ranges, work, bytes, [&](int64_t unit, void* scratch) {
    const int64_t row = unit / ranges, begin = unit % ranges * range;
    const int64_t end = std::min(begin + range, p.num_keys);
    const kernels::KeyRange keys{row / p.kv_heads, row % p.kv_heads, begin, end};
    few ? kernel.backward_few(b, keys, scratch) : pass.run(keys, scratch);
  });
  if (!shares.defined()) return;
  const at::Tensor sum = shares[0];
  for (int64_t i = 1; i < ranges; ++i) sum.add_(shares[i]);
  grad_query.copy_(sum.mul_(p.scale));
}

// Which axes of the pairs (B, H, T_q, T_kv) a gradient has of its own; it is summed over the others, and over so many
// keys.
struct OwnAxes {
  bool batch, head, query, key;
  int64_t num_keys;
};

int64_t num_masked_keys(const AttentionParams& p) { return p.num_keys - p.appended_keys; }

// Adds dS to a gradient. A unit owns a piece of it and adds to it, in order, the tiles of every (b, h, query block,
// key) that the piece is broadcast over.
void add_score_gradients(const Pass& pass, const OwnAxes& own, const kernels::MaskGradientView& view) {
  const AttentionParams& p = pass.b.attention;
  const int64_t keys = own.num_keys;
  constexpr int64_t kKeysPerUnit = 512;
  const int64_t blocks = divide_up(p.num_queries, p.query_block);
  const int64_t keys_per_unit = own.key && !own.query ? kKeysPerUnit : keys;
  const std::array<int64_t, 4> units = {own.batch ? p.batch : 1, own.head ? p.heads : 1, own.query ? blocks : 1,
                                        divide_up(keys, keys_per_unit)};
  const std::array<int64_t, 3> inner = {own.batch ? 1 : p.batch, own.head ? 1 : p.heads, own.query ? 1 : blocks};
  const int64_t inner_count = inner[0] * inner[1] * inner[2];
  const double work = multiply_adds(p, p.query_block, keys_per_unit) * static_cast<double>(inner_count);
  parallel_units(
      units[0] * units[1] * units[2] * units[3], work, pass.mask_scratch_bytes(), [&](int64_t unit, void* scratch) {
        const int64_t key_begin = unit % units[3] * keys_per_unit;
        const int64_t key_end = std::min(key_begin + keys_per_unit, keys);
        const int64_t unit_block = unit / units[3] % units[2];
        const int64_t unit_head = unit / (units[3] * units[2]) % units[1];
        const int64_t unit_batch = unit / (units[3] * units[2] * units[1]);
        for (int64_t i = 0; i < inner_count; ++i) {
          const int64_t begin = (unit_block + i % inner[2]) * p.query_block;
          const int64_t head = unit_head + i / inner[2] % inner[1];
          const int64_t batch = unit_batch + i / (inner[2] * inner[1]);
          const int64_t count = std::min(p.query_block, p.num_queries - begin);
          pass.add_mask_gradient({batch, head, begin, count}, {batch, head, key_begin, key_end}, view, scratch);
        }
      });
}

bool has_masked_pairs(const AttentionParams& p) { return p.num_queries > 0 && num_masked_keys(p) > 0; }

// The gradient of a mask in the mask's own shape and dtype; `bound` is the mask as the kernels see it.
at::Tensor mask_gradient(const Pass& pass, const at::Tensor& bound, const at::Tensor& mask) {
  const AttentionParams& p = pass.b.attention;
  const at::Tensor grad = at::zeros(bound.sizes(), bound.options());
  if (bound.numel() > 0 && has_masked_pairs(p)) {
    const OwnAxes own{bound.size(0) > 1, bound.size(1) > 1, bound.size(2) > 1, bound.size(3) > 1, num_masked_keys(p)};
    add_score_gradients(pass, own,
                        {grad.mutable_data_ptr(), own.batch ? grad.stride(0) : 0, own.head ? grad.stride(1) : 0,
                         own.query ? grad.stride(2) : 0, own.key ? grad.stride(3) : 0});
  }
  return grad.to(mask.scalar_type()).view(mask.sizes());
}

// A distance between query and key occurs in every block of queries: pieces are whole heads.
at::Tensor bias_gradient(const Pass& pass, const at::Tensor& turned) {
  const AttentionParams& p = pass.b.attention;
  const at::Tensor& bias = pass.args.variants.relative_bias;
  const at::Tensor grad = at::zeros(turned.sizes(), turned.options());
  if (turned.numel() > 0 && has_masked_pairs(p)) {
    const bool own_batch = turned.size(0) > 1, own_head = turned.size(1) > 1;
    char* first = static_cast<char*>(grad.mutable_data_ptr()) +
                  (num_masked_keys(p) - 1) * static_cast<int64_t>(grad.element_size());
    add_score_gradients(
        pass, {own_batch, own_head, false, false, num_masked_keys(p)},
        {first, own_batch ? grad.stride(0) : 0, own_head ? grad.stride(1) : 0, /*stride_q=*/1, /*stride_k=*/-1});
  }
  return at::empty(bias.sizes(), bias.options()).copy_(grad.narrow(-1, 0, bias.size(-1)).flip(-1));
}

// The scores of a row and its sink share dlse, of which there is none here: rowsum(dS) + dS_sink = 0.
at::Tensor sink_gradient(const Pass& pass) {
  const AttentionParams& p = pass.b.attention;
  const at::Tensor& sink = pass.args.variants.sink;
  const at::Tensor sums = at::zeros(sink.sizes(), sink.options().dtype(compute_type(pass.args.query)));
  if (p.num_queries > 0 && p.num_keys > 0) {
    const bool own_batch = sink.dim() == 2;
    add_score_gradients(pass, {own_batch, true, false, false, p.num_keys},
                        {sums.mutable_data_ptr(), own_batch ? p.heads : 0, /*stride_h=*/1, 0, 0});
  }
  return sums.neg_().to(sink.scalar_type());
}

AttentionGradients run(const Pass& pass, const BoundArguments& bound, const std::array<bool, kNumGradients>& wanted,
                       const GradientTargets& targets) {
  BackwardParams& b = pass.b;
  const AttentionArguments& args = pass.args;
  const at::Tensor grad_query = gradient_for(wanted[0], args.query, targets.query);
  const at::Tensor grad_key = gradient_for(wanted[1], args.key, targets.key);
  const at::Tensor grad_value = gradient_for(wanted[2], args.value, targets.value);
  if (wanted[0]) b.grad_query = mutable_view_of(grad_query);
  if (wanted[1]) b.grad_key = mutable_view_of(grad_key);
  if (wanted[2]) b.grad_value = mutable_view_of(grad_value);
  if (b.attention.num_keys == 0) {
    if (wanted[0]) grad_query.zero_();
  } else if (wanted[0] || wanted[1] || wanted[2]) {
    input_gradients(pass, grad_query);
  }
  at::Tensor grad_mask, grad_padding, grad_bias, grad_sink;
  if (wanted[3]) grad_mask = mask_gradient(pass, bound.attn_mask, args.attn_mask);
  if (wanted[4]) grad_padding = mask_gradient(pass, bound.key_padding_mask, args.key_padding_mask);
  if (wanted[5]) grad_bias = bias_gradient(pass, bound.relative_bias);
  if (wanted[6]) grad_sink = sink_gradient(pass);
  return {grad_query, grad_key, grad_value, grad_mask, grad_padding, grad_bias, grad_sink};
}

}  // namespace

AttentionGradients run_backward(BackwardParams& b, const AttentionArguments& args, const BoundArguments& bound,
                                const std::array<bool, kNumGradients>& wanted, const GradientTargets& targets) {
  return run({b, nullptr, args, kernels_for(args)}, bound, wanted, targets);
}

AttentionGradients run_tangent_backward(kernels::TangentParams& m, const AttentionArguments& args,
                                        const BoundArguments& bound, const std::array<bool, kNumGradients>& wanted) {
  return run({m.backward, &m, args, kernels_for(compute_type(args.query))}, bound, wanted, {});
}

}  // namespace mha_ext::cpu
