#include "short_linear.h"

#include <ATen/ops/empty.h>

#include "arguments.h"
#include "parallel.h"

namespace mha_ext::cpu {
namespace {

// Where the kernels cross, with float32, AVX-512 and two threads (AMD Zen 4), a layer's time at E = 512 in us by
// linear_rows and linear_columns: 7 rows 151 and 193, 8 rows 169 and 200, 10 rows 199 and 200.
constexpr int64_t kFewRows = 8;

// The kernels' table says up to how many rows they were measured to be faster than a library that was written for other
// processors. Intel's is only taken to be slower while reading the weights is most of the work: not measured there.
constexpr int64_t kMostRowsOnIntel = 32;

int64_t most_rows(const kernels::KernelTable& kernel) {
#ifdef MHA_EXT_X86
  if (__builtin_cpu_is("intel")) return std::min(kernel.most_linear_rows, kMostRowsOnIntel);
#endif
  return kernel.most_linear_rows;
}

// Sums over rows stay faster for longer: backward of a layer takes 4 to 17 % less time at 16 to 128 rows, 6 % at 256,
// and is even at 512 (E = 256 ... 1024).
constexpr int64_t kMostSummed = 2;

int64_t row_count(const at::Tensor& input) { return c10::multiply_integers(input.sizes().slice(0, input.dim() - 1)); }

kernels::LinearRows bind(const at::Tensor& input, const at::Tensor& weight, const std::optional<at::Tensor>& bias,
                         const at::Tensor& out) {
  kernels::LinearRows p;
  p.type = element_type(input.scalar_type());
  p.input = input.const_data_ptr();
  p.weight = weight.const_data_ptr();
  p.bias = bias.has_value() ? bias->const_data_ptr() : nullptr;
  p.out = out.mutable_data_ptr();
  p.rows = row_count(input);
  p.depth = weight.size(1);
  p.input_stride = p.depth, p.weight_stride = weight.stride(0), p.out_stride = weight.size(0);
  return p;
}

// Calls run(begin, end, scratch) for pieces of [0, count), `work` multiply-adds for each one of it.
template <typename Run>
void in_pieces(int64_t count, int64_t piece, int64_t work, size_t scratch_bytes, const Run& run) {
  parallel_units(divide_up(count, piece), static_cast<double>(work * piece), scratch_bytes,
                 [&](int64_t unit, void* scratch) { run(unit * piece, std::min((unit + 1) * piece, count), scratch); });
}

// The last rows would leave most lanes of a vector empty: up to half of them, they go to linear_rows while the weights
// are at hand.
kernels::LinearRows split_last_rows(kernels::LinearRows& p, int64_t width, int64_t element) {
  kernels::LinearRows last = p;
  last.rows = p.rows % width <= width / 2 ? p.rows % width : 0;
  p.rows -= last.rows;
  last.input = static_cast<const char*>(p.input) + p.rows * p.input_stride * element;
  last.out = static_cast<char*>(p.out) + p.rows * p.out_stride * element;
  return last;
}

void run_in_columns(const kernels::KernelTable& kernel, kernels::LinearRows p, int64_t columns,
                    const at::TensorOptions& options) {
  const int64_t width = kernel.vector_width, block = kernels::kLinearBlock;
  const kernels::LinearRows last = split_last_rows(p, width, static_cast<int64_t>(options.dtype().itemsize()));
  const at::Tensor turned = at::empty({divide_up(p.depth, width) * width, divide_up(p.rows, width) * width},
                                      options.dtype(compute_type(options.dtype().toScalarType())));
  void* input = turned.mutable_data_ptr();
  const size_t scratch_bytes = kernel.linear_scratch_bytes(p);
  in_pieces(p.depth, block, p.rows, scratch_bytes, [&](int64_t begin, int64_t end, void* scratch) {
    kernel.turn_linear_input(p, begin, end, input, scratch);
  });
  in_pieces(columns, block, p.rows * p.depth, scratch_bytes, [&](int64_t begin, int64_t end, void* scratch) {
    kernel.linear_columns(p, input, begin, end, scratch);
    kernel.linear_rows(last, begin, end);
  });
}

}  // namespace

namespace {

bool is_computed(at::ScalarType type) {
  return type == at::kFloat || type == at::kDouble || type == at::kBFloat16 || type == at::kHalf;
}

}  // namespace

bool is_short(const at::Tensor& input, const at::Tensor& weight) {
  const at::ScalarType type = input.scalar_type();
  if (!is_computed(type) || input.dim() < 2 || input.numel() == 0 || weight.numel() == 0) return false;
  if (type == at::kBFloat16 && (input.size(-1) % 2 != 0 || weight.stride(0) % 2 != 0)) return false;
  return row_count(input) <= most_rows(kernels_for(type)) && weight.stride(1) == 1;
}

at::Tensor short_linear(const at::Tensor& input, const at::Tensor& weight, const std::optional<at::Tensor>& bias) {
  const int64_t columns = weight.size(0);
  c10::DimVector sizes(input.sizes());
  sizes.back() = columns;
  const at::Tensor out = at::empty(sizes, input.options());
  const kernels::KernelTable& kernel = kernels_for(input.scalar_type());
  const at::Tensor rows = input.contiguous();  // costs nothing beside the product, where it copies
  const kernels::LinearRows p = bind(rows, weight, bias, out);
  if (p.rows <= kFewRows) {
    in_pieces(columns, kernel.vector_width, p.rows * p.depth, 0,
              [&](int64_t begin, int64_t end, void*) { kernel.linear_rows(p, begin, end); });
  } else {
    run_in_columns(kernel, p, columns, input.options());
  }
  return out;
}

bool is_short_sum(const at::Tensor& left, const at::Tensor& right) {
  const at::ScalarType type = left.scalar_type();
  if (type != right.scalar_type() || (type != at::kFloat && type != at::kDouble)) return false;
  const kernels::KernelTable& kernel = kernels_for(type);
  return left.size(0) <= kMostSummed * most_rows(kernel) && left.stride(1) == 1 && right.stride(1) == 1 &&
         left.size(1) % kernels::kLinearBlock == 0 && right.size(1) % kernel.vector_width == 0;
}

at::Tensor sum_of_rows(const at::Tensor& left, const at::Tensor& right) {
  const at::Tensor out = at::empty({left.size(1), right.size(1)}, left.options());
  const kernels::KernelTable& kernel = kernels_for(left.scalar_type());
  kernels::SumOfRows p;
  p.left = left.const_data_ptr();
  p.right = right.const_data_ptr();
  p.out = out.mutable_data_ptr();
  p.rows = left.size(0), p.width = right.size(1);
  p.left_stride = left.stride(0), p.right_stride = right.stride(0);
  in_pieces(left.size(1), kernels::kLinearBlock, p.rows * p.width, 0,
            [&](int64_t begin, int64_t /*end*/, void*) { kernel.sum_of_rows(p, begin); });
  return out;
}

}  // namespace mha_ext::cpu
