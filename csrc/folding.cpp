#include "folding.h"

#include <ATen/TensorOperators.h>
#include <ATen/functorch/BatchedTensorImpl.h>

#include <algorithm>

namespace mha_ext {

namespace {

// Null when the tensor is none.
const at::functorch::BatchedTensorImpl* batched(const at::Tensor& tensor) {
  return tensor.defined() ? at::functorch::maybeGetBatchedImpl(tensor) : nullptr;
}

}  // namespace

Folding::Folding(at::ArrayRef<at::Tensor> tensors) : below_(c10::DispatchKey::FuncTorchBatched) {
  for (const at::Tensor& tensor : tensors) {
    const auto* impl = batched(tensor);
    if (impl == nullptr || impl->level() < level_) continue;
    level_ = impl->level();
    count_ = impl->value().sym_size(impl->bdim());
  }
}

bool Folding::varies(const at::Tensor& tensor) const {
  const auto* impl = batched(tensor);
  return impl != nullptr && impl->level() == level_;
}

at::Tensor Folding::unwrap(const at::Tensor& tensor) const {
  if (!varies(tensor)) return tensor;
  const auto* impl = batched(tensor);
  return impl->value().movedim(impl->bdim(), 0);
}

at::Tensor Folding::all(const at::Tensor& tensor) const {
  const at::Tensor value = unwrap(tensor);
  if (varies(tensor)) return value;
  std::vector<c10::SymInt> sizes = value.sym_sizes().vec();
  sizes.insert(sizes.begin(), count_);
  return value.expand_symint(sizes);
}

at::Tensor Folding::rows(const at::Tensor& tensor) const {
  return tensor.defined() ? all(tensor).flatten(0, 1) : tensor;
}

at::Tensor Folding::mask(const at::Tensor& tensor, const c10::SymInt& samples, bool own) const {
  if (!tensor.defined()) return tensor;
  const bool shared = tensor.sym_size(0) == 1;
  if (shared && !own && !varies(tensor)) return unwrap(tensor);
  std::vector<c10::SymInt> sizes = tensor.sym_sizes().vec();
  sizes[0] = samples;
  sizes.insert(sizes.begin(), count_);
  return all(tensor).expand_symint(sizes).flatten(0, 1);
}

at::Tensor Folding::seeds(const at::Tensor& seed) const { return seed.defined() ? all(seed).flatten() : seed; }

at::Tensor Folding::ranges(const at::Tensor& range, const c10::SymInt& samples) const {
  if (!range.defined() || (!varies(range) && range.sym_size(1) == 1)) return range;
  const at::Tensor apart = all(range).movedim(0, 1);  // (2, N, B or 1, T)
  return apart.expand_symint({2, count_, samples, apart.sym_size(3)}).flatten(1, 2);
}

at::Tensor Folding::sink(const at::Tensor& sink, const c10::SymInt& samples, bool own) const {
  if (!sink.defined() || sink.dim() == 2) return rows(sink);
  if (!own && !varies(sink)) return sink;
  return all(sink).unsqueeze(1).expand_symint({count_, samples, sink.sym_size(0)}).flatten(0, 1);
}

AttentionArguments Folding::arguments(const AttentionArguments& a, const std::array<bool, kNumGradients>& own) const {
  const c10::SymInt samples = a.query.sym_size(0);
  AttentionArguments folded = a;
  folded.query = rows(a.query), folded.key = rows(a.key), folded.value = rows(a.value);
  folded.attn_mask = mask(a.attn_mask, samples, own[3]);
  folded.key_padding_mask = mask(a.key_padding_mask, samples, own[4]);
  folded.dropout_seed = seeds(a.dropout_seed);
  Variants& v = folded.variants;
  v.relative_bias = mask(a.variants.relative_bias, samples, own[5]);
  v.key_range = ranges(a.variants.key_range, samples);
  v.sink = sink(a.variants.sink, samples, own[6]);
  return folded;
}

at::Tensor Folding::unfold(const at::Tensor& tensor, const c10::SymInt& samples) const {
  if (!tensor.defined()) return tensor;
  const at::Tensor apart = tensor.unflatten_symint(0, {count_, samples});
  return at::functorch::makeBatched(apart, 0, level_);
}

at::Tensor Folding::unfold_mask(const at::Tensor& tensor, const c10::SymInt& samples, const at::Tensor& like) const {
  if (!tensor.defined()) return tensor;
  at::Tensor apart = tensor.unflatten_symint(0, {count_, samples});
  if (like.sym_size(0) == 1 && samples != 1) apart = apart.sum(1, /*keepdim=*/true);
  return at::functorch::makeBatched(apart, 0, level_);
}

at::Tensor Folding::unfold_sink(const at::Tensor& tensor, const c10::SymInt& samples, const at::Tensor& like) const {
  if (!tensor.defined()) return tensor;
  at::Tensor apart = tensor.unflatten_symint(0, {count_, samples});
  if (like.dim() == 1) apart = apart.sum(1);
  return at::functorch::makeBatched(apart, 0, level_);
}

}  // namespace mha_ext
