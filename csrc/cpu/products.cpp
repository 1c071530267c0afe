#include "products.h"

#include <ATen/Context.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/ops/linear.h>
#include <ATen/ops/mm.h>

#include "short_linear.h"

namespace mha_ext::cpu {
namespace {

// PyTorch's own entry to oneDNN's float32 product, which its compiler calls too.
using OneDnnLinear = at::Tensor(const at::Tensor&, const at::Tensor&, const std::optional<at::Tensor>&,
                                c10::string_view, c10::List<std::optional<at::Scalar>>,
                                std::optional<c10::string_view>);

std::optional<c10::TypedOperatorHandle<OneDnnLinear>> find_onednn() {
  const auto op = c10::Dispatcher::singleton().findSchema({"mkldnn::_linear_pointwise", ""});
  if (!op.has_value()) return std::nullopt;
  return op->typed<OneDnnLinear>();
}

// MKL, which PyTorch calls, holds back on processors of others. Measured on AMD Zen 4, one thread, GF/s of 117 at most,
// MKL and oneDNN: y = x W^T at (M, K, N) = (4096, 512, 1536) 84 and 104, (128, 512, 512) 98 and 105, (2048, 256, 768)
// 95 and 102, (16, 128, 384) 55 and 40; x gradients alike, weight gradients (long sums) 96 and 80.
bool prefers_onednn() {
#ifdef MHA_EXT_X86
  static const bool prefers = !__builtin_cpu_is("intel");
  return prefers;
#else
  return false;
#endif
}

constexpr int64_t kLeastRows = 64, kLeastSize = 1 << 22;  // M, and M K N: below, the call costs more than it saves

const std::optional<c10::TypedOperatorHandle<OneDnnLinear>>& onednn() {
  static const auto op = find_onednn();
  return op;
}

// PyTorch takes oneDNN for these on its own, but copies the bias into every row first.
bool multiplies_bfloat16(const at::Tensor& tensor) {
#ifdef MHA_EXT_X86
  static const bool multiplies =
      __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq");
  return multiplies && tensor.scalar_type() == at::kBFloat16;
#else
  return false;
#endif
}

// PyTorch's products of float16 run at 2 to 37 GF/s on a processor without float16 arithmetic (AMD Zen 4), those of
// float32 at 180.
bool multiplies_float16() {
#ifdef MHA_EXT_X86
  static const bool multiplies = __builtin_cpu_supports("avx512fp16");
  return multiplies;
#else
  return true;
#endif
}

bool is_widened(const at::Tensor& left, const at::Tensor& right) {
  return left.scalar_type() == at::kHalf && right.scalar_type() == at::kHalf && left.numel() > 0 && right.numel() > 0 &&
         !multiplies_float16();
}

at::Tensor widened(const at::Tensor& tensor) { return tensor.to(at::kFloat); }

bool is_large(const at::Tensor& input, const at::Tensor& weight) {
  const int64_t columns = weight.size(0), depth = weight.size(1);
  return input.numel() >= kLeastRows * depth && input.numel() * columns >= kLeastSize &&
         (input.scalar_type() == at::kFloat ? prefers_onednn() : multiplies_bfloat16(input)) &&
         at::globalContext().userEnabledMkldnn() && onednn().has_value();
}

// The bias is contiguous: oneDNN's product does not look at its stride.
at::Tensor onednn_linear(const at::Tensor& input, const at::Tensor& weight, const std::optional<at::Tensor>& bias) {
  return onednn()->call(input, weight, bias, "none", c10::List<std::optional<at::Scalar>>(), "");
}

bool fit(const at::Tensor& input, const at::Tensor& weight, const std::optional<at::Tensor>& bias) {
  if (input.dim() < 2 || weight.dim() != 2 || input.size(-1) != weight.size(1)) return false;
  if (input.scalar_type() != weight.scalar_type()) return false;
  return !bias.has_value() ||
         (bias->dim() == 1 && bias->size(0) == weight.size(0) && bias->scalar_type() == weight.scalar_type());
}

}  // namespace

bool has_fast_linear(const at::Tensor& input, const at::Tensor& weight, const std::optional<at::Tensor>& bias) {
  return fit(input, weight, bias) && (is_short(input, weight) || is_large(input, weight) || is_widened(input, weight));
}

at::Tensor fast_linear(const at::Tensor& input, const at::Tensor& weight, const std::optional<at::Tensor>& bias) {
  const std::optional<at::Tensor> dense_bias = bias.has_value() ? std::optional(bias->contiguous()) : std::nullopt;
  if (is_short(input, weight)) return short_linear(input, weight, dense_bias);
  if (!is_widened(input, weight)) return onednn_linear(input, weight, dense_bias);
  const at::Tensor wide_input = widened(input), wide_weight = widened(weight);
  const std::optional<at::Tensor> wide_bias = bias.has_value() ? std::optional(widened(*dense_bias)) : std::nullopt;
  const at::Tensor out = has_fast_linear(wide_input, wide_weight, wide_bias)
                             ? fast_linear(wide_input, wide_weight, wide_bias)
                             : at::linear(wide_input, wide_weight, wide_bias);
  return out.to(input.scalar_type());
}

at::Tensor product(const at::Tensor& left, const at::Tensor& right) {
  if (is_widened(left, right)) return product(widened(left), widened(right)).to(left.scalar_type());
  const at::Tensor turned = right.t();
  return is_large(left, turned) ? onednn_linear(left, turned, std::nullopt) : at::mm(left, right);
}

at::Tensor transposed_product(const at::Tensor& left, const at::Tensor& right) {
  if (is_widened(left, right)) return transposed_product(widened(left), widened(right)).to(left.scalar_type());
  return is_short_sum(left, right) ? sum_of_rows(left, right) : at::mm(left.t(), right);
}

}  // namespace mha_ext::cpu
