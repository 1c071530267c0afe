// What the operators' contracts (checks.h) have in common: one argument, one expectation, the same words everywhere.
#pragma once

#include <ATen/core/Tensor.h>

#include <optional>
#include <ostream>

#include "attention.h"

namespace mha_ext {

// One argument in an error message: "<function>: <name> must ...".
struct Argument {
  const char* function;
  const char* name;
};

std::ostream& operator<<(std::ostream& stream, const Argument& argument);

// The masks' four axes in full.
struct PairSizes {
  c10::SymInt batch, heads, queries, keys;
};

void check_float(const Argument& argument, const at::Tensor& tensor);
void check_rank(const Argument& argument, const at::Tensor& tensor, int64_t rank, const char* shape);
void check_size(const Argument& argument, const at::Tensor& tensor, int64_t dim, const c10::SymInt& expected,
                const char* meaning);
void check_shape(const Argument& argument, const at::Tensor& tensor, c10::SymIntArrayRef shape);
void check_device(const Argument& argument, const at::Tensor& tensor, const at::Tensor& query);
void check_same_kind(const Argument& argument, const at::Tensor& tensor, const at::Tensor& query);
bool broadcasts(const at::Tensor& mask, c10::SymIntArrayRef shape);

void check_masks(const char* function, const at::Tensor& attn_mask, const at::Tensor& key_padding_mask,
                 const PairSizes& sizes, const at::Tensor& query);
void check_numbers(const char* function, double dropout_p, int64_t causal, std::optional<double> scale);
void check_dropout_seed(const char* function, const at::Tensor& seed, double dropout_p, const c10::SymInt& samples,
                        const at::Tensor& query);

// Of out's shape, or empty, with one axis; always so for float32 and float64.
void check_rounding(const Argument& argument, const at::Tensor& rounding, c10::SymIntArrayRef shape,
                    const at::Tensor& query);
// Of lse and its gradient: float64 for float64, float32 for everything else.
void check_lse_kind(const Argument& argument, const at::Tensor& lse, const at::Tensor& query);

// Of what a gradient is asked for.
void check_mask_gradient(const Argument& argument, const at::Tensor& mask, bool wanted);
void check_is_given(const Argument& argument, const at::Tensor& tensor, bool wanted);

}  // namespace mha_ext
