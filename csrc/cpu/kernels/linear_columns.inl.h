// The linear map of some tens or hundreds of rows, which are lanes: with X^T [K][lanes] at hand,
//   Y^T[n][m] = bias[n] + sum_k W[n][k] X^T[k][m]
// reads each weight as it lies, like a key in S^T = K Q^T, and only once: nothing is packed. That is what a product of
// so few rows spends its time on.
#pragma once

#include "linear_rows.h"
#include "terms.inl.h"

namespace mha_ext::kernels {
namespace {

// Terms of the sums at a time: X^T of one panel stays in the first-level cache.
constexpr int64_t kLinearDepth = 128;

template <class V>
struct LinearScratch {
  using Scalar = typename V::Scalar;
  Scalar *sums, *rows, *weights;

  LinearScratch(Arena&& arena, const LinearRows& p) {
    const int64_t lanes = round_up(p.rows, V::kWidth);
    sums = arena.take<Scalar>(kLinearBlock * lanes);
    rows = arena.take<Scalar>(kLinearBlock * lanes);
    weights = arena.take<Scalar>(kLinearBlock * kLinearDepth);
    bytes = arena.used();
  }
  size_t bytes;
};

template <class V>
size_t linear_scratch_bytes(const LinearRows& p) {
  return LinearScratch<V>(Arena(nullptr), p).bytes;
}

template <class View, class Data>
View linear_view(const LinearRows& p, Data* data, int64_t stride) {
  View view;
  view.data = data;
  view.type = p.type;
  view.stride_t = stride;
  view.stride_d = 1;
  return view;
}

// X^T of up to kLinearBlock terms from `begin` on, as numbers or in pairs.
template <class V>
void turn_linear_input(const LinearRows& p, int64_t begin, int64_t end, void* columns, void* scratch) {
  using Term = typename V::Term;
  const int64_t lanes = round_up(p.rows, V::kWidth);
  const LinearScratch<V> s(Arena(scratch), p);
  const TensorView input = skip_columns(linear_view<TensorView>(p, p.input, p.input_stride), begin);
  const QueryBlock rows{0, 0, 0, p.rows};
  Term* turned = static_cast<Term*>(columns) + begin / kNumbersIn<Term> * lanes;
  if constexpr (V::kMultipliesPairs) {
    read_pair_columns<V>(input, rows, lanes, end - begin, s.rows, turned);
  } else {
    read_columns<V>(input, rows, lanes, end - begin, Term(1), s.rows, round_up(end - begin, V::kWidth), turned);
  }
}

// Rows of the weight from `begin` on, in the part of the sums that begins at k: as they lie, or widened.
template <class V>
Rows<typename V::Term> linear_weights(const LinearRows& p, const QueryBlock& rows, int64_t k, int64_t depth,
                                      LinearScratch<V>& s) {
  using Term = typename V::Term;
  const TensorView weight = skip_columns(linear_view<TensorView>(p, p.weight, p.weight_stride), k);
  if constexpr (V::kMultipliesPairs) {
    return {reinterpret_cast<const Term*>(first_half(weight, rows)), p.weight_stride / 2};
  } else {
    if (p.type == kTypeOf<Term>) return {pointer_to<Term>(weight.data) + rows.begin * p.weight_stride, p.weight_stride};
    read_rows<V>(weight, rows, rows.count, depth, Term(1), s.weights, kLinearDepth);
    return {s.weights, kLinearDepth};
  }
}

template <class V>
void start_sums(const LinearRows& p, int64_t begin, int64_t count, int64_t lanes, LinearScratch<V>& s) {
  using Scalar = typename V::Scalar;
  Scalar bias[kLinearBlock] = {};
  if (p.bias != nullptr) {
    const TensorView view = skip_columns(linear_view<TensorView>(p, p.bias, 0), begin);
    read_rows<V>(view, {0, 0, 0, 1}, 1, count, Scalar(1), bias, kLinearBlock);
  }
  for (int64_t n = 0; n < count; ++n) {
    for (int64_t c = 0; c < lanes; c += V::kWidth) V::store(s.sums + n * lanes + c, V::broadcast(bias[n]));
  }
}

// Up to kLinearBlock outputs from `begin` on.
template <class V>
void linear_columns(const LinearRows& p, const void* columns, int64_t begin, int64_t end, void* scratch) {
  using Scalar = typename V::Scalar;
  using Term = typename V::Term;
  constexpr int64_t kDepth = kLinearDepth * kNumbersIn<Term>;
  const int64_t lanes = round_up(p.rows, V::kWidth), count = end - begin;
  LinearScratch<V> s(Arena(scratch), p);
  start_sums<V>(p, begin, count, lanes, s);
  for (int64_t k = 0; k < p.depth; k += kDepth) {
    const int64_t depth = min_of(kDepth, p.depth - k);
    const Rows<Term> weights = linear_weights<V>(p, {0, 0, begin, count}, k, depth, s);
    const Term* input = static_cast<const Term*>(columns) + k / kNumbersIn<Term> * lanes;
    const GemmOperands<Scalar, Term> g{weights.data, weights.ld, input, lanes, s.sums, lanes, terms_in<Term>(depth)};
    gemm<V, Lhs::ByRow, Start::Add, kLinearDepth>(g, count, lanes);
  }
  write_columns<V>(skip_columns(linear_view<MutableTensorView>(p, p.out, p.out_stride), begin), {0, 0, 0, p.rows},
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
