#include "argument_checks.h"

#include <c10/util/Exception.h>

#include <cmath>

namespace mha_ext {

std::ostream& operator<<(std::ostream& stream, const Argument& argument) {
  return stream << argument.function << ": " << argument.name << " must";
}

namespace {

bool is_supported_float(at::ScalarType dtype) {
  return dtype == at::kDouble || dtype == at::kFloat || dtype == at::kBFloat16 || dtype == at::kHalf;
}

}  // namespace

void check_float(const Argument& argument, const at::Tensor& tensor) {
  TORCH_CHECK_TYPE(is_supported_float(tensor.scalar_type()), argument,
                   " be float64, float32, bfloat16 or float16, got ", tensor.scalar_type());
}

void check_rank(const Argument& argument, const at::Tensor& tensor, int64_t rank, const char* shape) {
  TORCH_CHECK_VALUE(tensor.dim() == rank, argument, " have ", rank, " dimensions ", shape, ", got ", tensor.dim());
}

void check_size(const Argument& argument, const at::Tensor& tensor, int64_t dim, const c10::SymInt& expected,
                const char* meaning) {
  TORCH_CHECK_VALUE(tensor.sym_size(dim) == expected, argument, " have ", meaning, " ", expected, " (size ", dim,
                    "), got ", tensor.sym_size(dim));
}

void check_device(const Argument& argument, const at::Tensor& tensor, const at::Tensor& query) {
  TORCH_CHECK_VALUE(tensor.device() == query.device(), argument, " be on query's device ", query.device(), ", got ",
                    tensor.device());
}

void check_same_kind(const Argument& argument, const at::Tensor& tensor, const at::Tensor& query) {
  TORCH_CHECK_TYPE(tensor.scalar_type() == query.scalar_type(), argument, " have query's dtype ", query.scalar_type(),
                   ", got ", tensor.scalar_type());
  check_device(argument, tensor, query);
}

void check_mask_kind(const Argument& argument, const at::Tensor& mask, const at::Tensor& query) {
  TORCH_CHECK_TYPE(mask.scalar_type() == at::kBool || is_supported_float(mask.scalar_type()), argument,
                   " be bool or floating point, got ", mask.scalar_type());
  check_device(argument, mask, query);
}

bool broadcasts(const at::Tensor& mask, c10::SymIntArrayRef shape) {
  if (mask.dim() != static_cast<int64_t>(shape.size())) return false;
  for (size_t i = 0; i < shape.size(); ++i) {
    // The full size first: compared with 1, a size that depends on data could not be traced. So below.
    if (mask.sym_size(static_cast<int64_t>(i)) != shape[i] && mask.sym_size(static_cast<int64_t>(i)) != 1) return false;
  }
  return true;
}

void check_masks(const char* function, const at::Tensor& attn_mask, const at::Tensor& key_padding_mask,
                 const PairSizes& sizes, const at::Tensor& query) {
  if (attn_mask.defined()) {
    const Argument argument{function, "attn_mask"};
    check_mask_kind(argument, attn_mask, query);
    const std::array<c10::SymInt, 4> shape{sizes.batch, sizes.heads, sizes.queries, sizes.keys};
    TORCH_CHECK_VALUE(broadcasts(attn_mask, shape), argument, " have 4 dimensions that broadcast to ",
                      c10::SymIntArrayRef(shape), ", got ", attn_mask.sym_sizes());
  }
  if (key_padding_mask.defined()) {
    const Argument argument{function, "key_padding_mask"};
    check_mask_kind(argument, key_padding_mask, query);
    check_rank(argument, key_padding_mask, 2, "(batch, key length)");
    TORCH_CHECK_VALUE(key_padding_mask.sym_size(0) == sizes.batch || key_padding_mask.sym_size(0) == 1, argument,
                      " have batch size 1 or ", sizes.batch, " (size 0), got ", key_padding_mask.sym_size(0));
    check_size(argument, key_padding_mask, 1, sizes.keys, "key length");
  }
}

void check_numbers(const char* function, double dropout_p, int64_t causal, std::optional<double> scale) {
  TORCH_CHECK_VALUE(dropout_p >= 0.0 && dropout_p < 1.0, function, ": dropout_p must be in [0, 1), got ", dropout_p);
  TORCH_CHECK_VALUE(causal >= kNotCausal && causal <= kLowerRightPositions, function,
                    ": causal must be 0 (no), 1 (upper left), 2 (lower right) or 3 (no, but positions count from the "
                    "lower right), got ",
                    causal);
  TORCH_CHECK_VALUE(!scale.has_value() || std::isfinite(*scale), function, ": scale must be finite, got ", *scale);
}

void check_dropout_seed(const char* function, const at::Tensor& seed, double dropout_p, const c10::SymInt& samples,
                        const at::Tensor& query) {
  TORCH_CHECK_VALUE(seed.defined() == (dropout_p > 0.0), function,
                    ": dropout_seed must be given if and only if dropout_p > 0, got dropout_p ", dropout_p,
                    seed.defined() ? " with" : " without", " a seed");
  if (!seed.defined()) return;
  const Argument argument{function, "dropout_seed"};
  TORCH_CHECK_TYPE(seed.scalar_type() == at::kLong, argument, " be int64, got ", seed.scalar_type());
  const c10::SymInt seeds = seed.sym_numel();
  TORCH_CHECK_VALUE(seeds == 1 || (seeds > 1 && samples % seeds == 0), argument,
                    " have one element, or a number of them that divides the batch size ", samples, ", got shape ",
                    seed.sym_sizes());
  check_device(argument, seed, query);
}

void check_shape(const Argument& argument, const at::Tensor& tensor, c10::SymIntArrayRef shape) {
  TORCH_CHECK_VALUE(tensor.sym_sizes() == shape, argument, " have shape ", shape, ", got ", tensor.sym_sizes());
}

void check_rounding(const Argument& argument, const at::Tensor& rounding, c10::SymIntArrayRef shape,
                    const at::Tensor& query) {
  if (!rounding.defined()) return;
  if (rounding.dim() == 1 || !is_half(query)) {
    check_shape(argument, rounding, std::array<c10::SymInt, 1>{0});
  } else {
    check_shape(argument, rounding, shape);
  }
  TORCH_CHECK_TYPE(rounding.scalar_type() == at::kBFloat16, argument, " be bfloat16, got ", rounding.scalar_type());
  check_device(argument, rounding, query);
}

void check_lse_kind(const Argument& argument, const at::Tensor& lse, const at::Tensor& query) {
  const at::ScalarType dtype = query.scalar_type() == at::kDouble ? at::kDouble : at::kFloat;
  TORCH_CHECK_TYPE(lse.scalar_type() == dtype, argument, " be ", dtype, ", got ", lse.scalar_type());
  check_device(argument, lse, query);
}

void check_mask_gradient(const Argument& argument, const at::Tensor& mask, bool wanted) {
  TORCH_CHECK_VALUE(!wanted || (mask.defined() && mask.scalar_type() != at::kBool), argument,
                    " be floating point for its gradient to be asked for, got ", mask.defined() ? "bool" : "none");
}

void check_is_given(const Argument& argument, const at::Tensor& tensor, bool wanted) {
  TORCH_CHECK_VALUE(!wanted || tensor.defined(), argument, " be given for its gradient to be asked for, got none");
}

}  // namespace mha_ext
