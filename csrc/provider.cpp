// Three of PyTorch's operators are overridden for CPU tensors:
// - aten::scaled_dot_product_attention, at the key AutogradCPU (at CPU it would no longer come apart where programs are
//   exported, so calls in inference mode get no further than the next two). It chooses its backend without the
//   dispatcher, and sends dropout, masks that need gradients, values of another width, odd strides and other ranks than
//   4 to a composition that is quadratic in memory. All of them become one call of our attention operator;
// - aten::_scaled_dot_product_flash_attention_for_cpu and its backward, at the key CPU: they are what traced and
//   compiled programs hold.
// What is not ours to compute, errors included, goes on to PyTorch's own functions.
#include "provider.h"

#include <ATen/Context.h>
#include <ATen/TensorOperators.h>
#include <ATen/TensorSubclassLikeUtils.h>
#include <ATen/ops/_fused_sdp_choice_native.h>
#include <ATen/ops/_scaled_dot_product_flash_attention_for_cpu_backward_native.h>
#include <ATen/ops/_scaled_dot_product_flash_attention_for_cpu_native.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/randint.h>
#include <ATen/ops/scaled_dot_product_attention_native.h>
#include <torch/library.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <mutex>
#include <vector>

#include "attention.h"
#include "checks.h"
#include "cpu/forward_into.h"

namespace mha_ext {
namespace {

using Scale = std::optional<double>;

// Neither a subclass nor traced nor batched: those are to see PyTorch's operators.
bool is_plain(const at::Tensor& t) {
  return t.device().is_cpu() && t.layout() == at::kStrided && !t.is_nested() && !at::isTensorSubclassLike(t);
}

bool has_kernels(at::ScalarType type) {
  return type == at::kFloat || type == at::kDouble || type == at::kBFloat16 || type == at::kHalf;
}

// All that does not depend on the axes before the last two.
bool inputs_fit(const at::Tensor& query, const at::Tensor& key, const at::Tensor& value, const Scale& scale) {
  const int64_t rank = query.dim();
  const at::ScalarType type = query.scalar_type();
  if (rank < 2 || key.dim() != rank || value.dim() != rank) return false;
  if (!has_kernels(type) || key.scalar_type() != type || value.scalar_type() != type) return false;
  if (!is_plain(query) || !is_plain(key) || !is_plain(value)) return false;
  if (query.numel() == 0 || key.numel() == 0 || value.numel() == 0) return false;
  return query.size(-1) == key.size(-1) && key.size(-2) == value.size(-2) &&
         (!scale.has_value() || std::isfinite(*scale));
}

bool mask_fits(const at::Tensor& mask, const at::Tensor& query, const at::Tensor& key) {
  if (mask.dim() < 2 || mask.dim() > query.dim() || !is_plain(mask)) return false;
  const auto spans = [](int64_t size, int64_t full) { return size == 1 || size == full; };
  const at::ScalarType type = mask.scalar_type();  // PyTorch takes these
  return (type == at::kBool || type == at::kFloat || type == query.scalar_type()) &&
         spans(mask.size(-2), query.size(-2)) && spans(mask.size(-1), key.size(-2));
}

// torch.nn.attention.sdpa_kernel can switch fused kernels off, or put PyTorch's composition before them.
bool fused_comes_first() {
  at::Context& context = at::globalContext();
  if (!context.userEnabledFlashSDP()) return false;
  const auto order = context.sDPPriorityOrder();
  const auto flash = std::find(order.begin(), order.end(), at::SDPBackend::flash_attention);
  const auto math = std::find(order.begin(), order.end(), at::SDPBackend::math);
  return flash < math || !context.userEnabledMathSDP();
}

at::Tensor with_rank(at::Tensor t, int64_t rank) {
  while (t.dim() < rank) t = t.unsqueeze(0);
  return t;
}

// (T, D) and (N, T, D) get the axes that (N, H, T, D) has besides. N is a batch, or heads when these are grouped.
void add_axes(AttentionArguments& a, bool grouped) {
  const int64_t rank = a.query.dim();
  for (at::Tensor* t : {&a.query, &a.key, &a.value, &a.attn_mask}) {
    if (!t->defined()) continue;
    *t = with_rank(*t, rank);
    if (rank == 3 && !grouped) *t = t->unsqueeze(1);
    *t = with_rank(*t, 4);
  }
}

// Expands query, key and value (N..., H, T, D) to one batch and, unless they are grouped, to one number of heads;
// false when they, or the mask, do not fit.
bool broadcast_lead(AttentionArguments& a, bool grouped) {
  const int64_t heads_axis = a.query.dim() - 3;
  for (int64_t axis = 0; a.attn_mask.defined() && axis <= heads_axis; ++axis) {
    const int64_t pairs = std::max(a.query.size(axis), grouped && axis == heads_axis ? 1 : a.key.size(axis));
    if (a.attn_mask.size(axis) != 1 && a.attn_mask.size(axis) != pairs) return false;
  }
  std::vector<int64_t> lead;
  for (int64_t axis = 0; axis < heads_axis + (grouped ? 0 : 1); ++axis) {
    const std::array<int64_t, 3> sizes{a.query.size(axis), a.key.size(axis), a.value.size(axis)};
    lead.push_back(*std::max_element(sizes.begin(), sizes.end()));
    if (std::any_of(sizes.begin(), sizes.end(), [&](int64_t n) { return n != 1 && n != lead.back(); })) return false;
  }
  if (grouped && (a.key.size(-3) != a.value.size(-3) || a.query.size(-3) % a.key.size(-3) != 0)) return false;
  for (at::Tensor* t : {&a.query, &a.key, &a.value}) {
    std::vector<int64_t> sizes = t->sizes().vec();
    std::copy(lead.begin(), lead.end(), sizes.begin());
    if (t->sizes() != sizes) *t = t->expand(sizes);
  }
  return true;
}

// (N..., H, T, X) with one N. A mask that does not vary over any N keeps size 1.
at::Tensor merge_batch(const at::Tensor& t, const at::Tensor& query) {
  if (!t.defined() || t.dim() == 4) return t;
  const int64_t batch_axes = t.dim() - 3;
  const at::IntArrayRef batch = t.sizes().slice(0, batch_axes);
  std::vector<int64_t> sizes = t.sizes().vec();
  if (std::any_of(batch.begin(), batch.end(), [](int64_t n) { return n != 1; })) {
    std::copy_n(query.sizes().begin(), batch_axes, sizes.begin());
  }
  return t.expand(sizes).flatten(0, batch_axes - 1);
}

// Of the caller's rank, from inputs (N..., H, T, D) after broadcasting; of what was added, only one axis can differ
// from 1.
std::vector<int64_t> output_shape(const AttentionArguments& a, int64_t rank) {
  std::vector<int64_t> shape = a.query.sizes().vec();
  if (rank == 3) shape = {shape[0] * shape[1], shape[2], 0};
  if (rank == 2) shape = {shape[2], 0};
  shape.back() = a.value.size(-1);
  return shape;
}

at::Tensor scaled_dot_product_attention(const at::Tensor& query, const at::Tensor& key, const at::Tensor& value,
                                        const OptionalTensor& attn_mask, double dropout_p, bool is_causal, Scale scale,
                                        bool enable_gqa) {
  const auto pytorch = [&] {
    return at::native::scaled_dot_product_attention(query, key, value, attn_mask, dropout_p, is_causal, scale,
                                                    enable_gqa);
  };
  if (!inputs_fit(query, key, value, scale) || !(dropout_p >= 0.0 && dropout_p < 1.0)) return pytorch();
  if (attn_mask.has_value() && (is_causal || !mask_fits(*attn_mask, query, key))) return pytorch();
  if (!fused_comes_first() || (enable_gqa && query.dim() < 3)) return pytorch();

  AttentionArguments a{query, key, value, from_optional(attn_mask), {}, {}, dropout_p};
  a.causal = is_causal ? kUpperLeft : kNotCausal;
  a.scale = scale;
  add_axes(a, enable_gqa);
  if (!broadcast_lead(a, enable_gqa)) return pytorch();
  const std::vector<int64_t> shape = output_shape(a, query.dim());
  const at::Tensor broadcast_query = a.query;
  for (at::Tensor* t : {&a.query, &a.key, &a.value, &a.attn_mask}) *t = merge_batch(*t, broadcast_query);
  if (dropout_p > 0.0) {
    using Seeds = std::numeric_limits<int64_t>;
    a.dropout_seed = at::randint(Seeds::min(), Seeds::max(), {1}, query.options().dtype(at::kLong));
  }
  const at::Tensor out = std::get<0>(call_attention(a));
  if (at::globalContext().userEnabledMathSDP() &&
      at::native::_fused_sdp_choice_cpp(query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa) ==
          static_cast<int64_t>(at::SDPBackend::flash_attention)) {
    return out;
  }
  // PyTorch's composition gives a contiguous tensor that no backward pass needs: programs view it and write into it.
  const at::Tensor result = query.dim() == 4 ? out : out.reshape(shape);
  return result.is_contiguous() && !result.requires_grad() ? result : result.clone(at::MemoryFormat::Contiguous);
}

// The arguments of the flash operators, four axes each, or nullopt when they are PyTorch's to compute.
std::optional<AttentionArguments> flash_arguments(const at::Tensor& query, const at::Tensor& key,
                                                  const at::Tensor& value, double dropout_p, bool is_causal,
                                                  const OptionalTensor& attn_mask, Scale scale) {
  if (query.dim() != 4 || dropout_p != 0.0 || !inputs_fit(query, key, value, scale)) return std::nullopt;
  if (attn_mask.has_value() && !mask_fits(*attn_mask, query, key)) return std::nullopt;
  AttentionArguments a{query, key, value, from_optional(attn_mask), {}, {}};
  a.causal = is_causal ? kUpperLeft : kNotCausal;
  a.scale = scale;
  add_axes(a, /*grouped=*/true);
  if (query.size(-1) != value.size(-1) || !broadcast_lead(a, /*grouped=*/true)) return std::nullopt;
  return a;
}

// For these two operators the output lies as query does, lse as (B, T, H), and lse is 0 for a query that sees no key.
AttentionResult flash_forward(const at::Tensor& query, const at::Tensor& key, const at::Tensor& value, double dropout_p,
                              bool is_causal, const OptionalTensor& attn_mask, Scale scale) {
  const auto a = flash_arguments(query, key, value, dropout_p, is_causal, attn_mask, scale);
  if (!a.has_value()) {
    return at::native::_scaled_dot_product_flash_attention_cpu(query, key, value, dropout_p, is_causal, attn_mask,
                                                               scale);
  }
  check_attention("attention", *a);
  const at::Tensor out = at::empty_like(query);
  const at::Tensor lse = cpu::attention_into(*a, {out}).transpose(1, 2).contiguous();
  lse.masked_fill_(lse == -std::numeric_limits<double>::infinity(), 0.0);
  return {out, lse.transpose(1, 2)};
}

std::tuple<at::Tensor, at::Tensor, at::Tensor> flash_backward(const at::Tensor& grad_out, const at::Tensor& query,
                                                              const at::Tensor& key, const at::Tensor& value,
                                                              const at::Tensor& out, const at::Tensor& lse,
                                                              double dropout_p, bool is_causal,
                                                              const OptionalTensor& attn_mask, Scale scale) {
  const auto a = flash_arguments(query, key, value, dropout_p, is_causal, attn_mask, scale);
  if (!a.has_value() || !is_plain(grad_out)) {
    return at::native::_scaled_dot_product_flash_attention_cpu_backward(grad_out, query, key, value, out, lse,
                                                                        dropout_p, is_causal, attn_mask, scale);
  }
  const auto [grad_query, grad_key, grad_value, mask, padding, bias, sink] =
      call_attention_backward(*a, {grad_out, at::Tensor(), out, lse, {true, true, true}});
  return {grad_query, grad_key, grad_value};
}

constexpr const char* kAttention = "scaled_dot_product_attention";
constexpr const char* kFlashForward = "_scaled_dot_product_flash_attention_for_cpu";
constexpr const char* kFlashBackward = "_scaled_dot_product_flash_attention_for_cpu_backward";

struct Provider {
  std::mutex mutex;
  std::vector<torch::Library> registrations;  // as long as they live
};

// Never destroyed: PyTorch's dispatcher may be gone by then.
Provider& provider() {
  static auto* const instance = new Provider;
  return *instance;
}

// The dispatcher warns of every override, which is what was asked for here.
class Silence : public c10::WarningHandler {
 public:
  void process(const c10::Warning&) override {}
};

}  // namespace

void install_provider() {
  const std::lock_guard<std::mutex> lock(provider().mutex);
  auto& registrations = provider().registrations;
  if (!registrations.empty()) return;
  Silence silence;
  const c10::WarningUtils::WarningHandlerGuard guard(&silence);
  auto& cpu = registrations.emplace_back(torch::Library::IMPL, "aten", c10::DispatchKey::CPU, __FILE__, __LINE__);
  cpu.impl(kFlashForward, TORCH_FN(flash_forward));
  cpu.impl(kFlashBackward, TORCH_FN(flash_backward));
  auto& autograd =
      registrations.emplace_back(torch::Library::IMPL, "aten", c10::DispatchKey::AutogradCPU, __FILE__, __LINE__);
  autograd.impl(kAttention, TORCH_FN(scaled_dot_product_attention));
}

void uninstall_provider() {
  const std::lock_guard<std::mutex> lock(provider().mutex);
  provider().registrations.clear();
}

}  // namespace mha_ext
