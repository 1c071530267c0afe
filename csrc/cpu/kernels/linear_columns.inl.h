// The linear map of some tens or hundreds of rows, which are lanes: with X^T [K][lanes] at hand,
//   Y^T[n][m] = bias[n] + sum_k W[n][k] X^T[k][m]
// reads each weight as it lies, like a key in S^T = K Q^T, and only once: nothing is packed. That is what a product of
// so few rows spends its time on.
#pragma once

#include "linear_rows.h"
#include "micro_gemm.inl.h"
#include "rows.inl.h"

namespace mha_ext::kernels {
namespace {

constexpr int64_t kLinearDepth = 128;  // terms of the sums at a time: X^T of one panel stays in the first-level cache

template <class V>
struct LinearScratch {
  using Scalar = typename V::Scalar;
  Scalar *sums, *rows;

  LinearScratch(Arena&& arena, const LinearRows& p) {
    const int64_t lanes = round_up(p.rows, V::kWidth);
    sums = arena.take<Scalar>(kLinearBlock * lanes);
    rows = arena.take<Scalar>(kLinearBlock * lanes);
    bytes = arena.used();
  }
  size_t bytes;
};

template <class V>
size_t linear_scratch_bytes(const LinearRows& p) {
  return LinearScratch<V>(Arena(nullptr), p).bytes;
}

template <class V, class View, class Data>
View linear_view(Data* data, int64_t stride) {
  View view;
  view.data = data;
  view.type = kTypeOf<typename V::Scalar>;
  view.stride_t = stride;
  view.stride_d = 1;
  return view;
}

// X^T of up to kLinearBlock terms from `begin` on.
template <class V>
void turn_linear_input(const LinearRows& p, int64_t begin, int64_t end, void* columns, void* scratch) {
  using Scalar = typename V::Scalar;
  const int64_t lanes = round_up(p.rows, V::kWidth);
  const LinearScratch<V> s(Arena(scratch), p);
  read_columns<V>(skip_columns(linear_view<V, TensorView>(p.input, p.input_stride), begin), {0, 0, 0, p.rows}, lanes,
                  end - begin, Scalar(1), s.rows, round_up(end - begin, V::kWidth),
                  static_cast<Scalar*>(columns) + begin * lanes);
}

// Up to kLinearBlock outputs from `begin` on.
template <class V>
void linear_columns(const LinearRows& p, const void* columns, int64_t begin, int64_t end, void* scratch) {
  using Scalar = typename V::Scalar;
  const int64_t lanes = round_up(p.rows, V::kWidth), count = end - begin;
  const auto* weight = static_cast<const Scalar*>(p.weight) + begin * p.weight_stride;
  const auto* bias = static_cast<const Scalar*>(p.bias);
  const LinearScratch<V> s(Arena(scratch), p);
  for (int64_t n = 0; n < count; ++n) {
    const auto start = V::broadcast(bias == nullptr ? Scalar(0) : bias[begin + n]);
    for (int64_t c = 0; c < lanes; c += V::kWidth) V::store(s.sums + n * lanes + c, start);
  }
  for (int64_t k = 0; k < p.depth; k += kLinearDepth) {
    const auto* input = static_cast<const Scalar*>(columns) + k * lanes;
    gemm<V, Lhs::ByRow, Start::Add, kLinearDepth>(
        {weight + k, p.weight_stride, input, lanes, s.sums, lanes, min_of(kLinearDepth, p.depth - k)}, count, lanes);
  }
  write_columns<V>(skip_columns(linear_view<V, MutableTensorView>(p.out, p.out_stride), begin), {0, 0, 0, p.rows},
                   lanes, count, s.sums, s.rows, round_up(count, V::kWidth), Unchanged());
}

// The factors are as they should lie: left is read one scalar at a time, lanes run along right.
template <class V>
void sum_of_rows(const SumOfRows& p, int64_t begin) {
  using Scalar = typename V::Scalar;
  const auto *left = static_cast<const Scalar*>(p.left) + begin, *right = static_cast<const Scalar*>(p.right);
  auto* out = static_cast<Scalar*>(p.out) + begin * p.width;
  gemm<V, Lhs::ByColumn, Start::Zero, kLinearDepth>({left, p.left_stride, right, p.right_stride, out, p.width, p.rows},
                                                    kLinearBlock, p.width);
}

}  // namespace
}  // namespace mha_ext::kernels
