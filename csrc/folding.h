// One level of vmap over attention: its axis joins the batch, so that the kernels run on all of it at once.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/impl/LocalDispatchKeySet.h>

#include <array>
#include <vector>

#include "attention.h"

namespace mha_ext {

// N is the size of vmap's axis, B the batch size that a call sees under it. While one lives, calls go on below vmap.
class Folding {
 public:
  // The innermost vmap that any of a call's tensors takes part in.
  explicit Folding(at::ArrayRef<at::Tensor> tensors);

  // Whether a tensor is another one for each of the N.
  bool varies(const at::Tensor& tensor) const;

  // (B, ...) of any of the N as (N B, ...); undefined stays undefined.
  at::Tensor rows(const at::Tensor& tensor) const;

  // (B or 1, ...), which may stay (1, ...) when it is the same for all N, unless each needs a gradient of its own.
  at::Tensor mask(const at::Tensor& tensor, const c10::SymInt& samples, bool own) const;

  // The same for bounds of keys, (2, B or 1, T).
  at::Tensor ranges(const at::Tensor& range, const c10::SymInt& samples) const;

  // And for a sink, (H) or (B, H).
  at::Tensor sink(const at::Tensor& sink, const c10::SymInt& samples, bool own) const;

  // Every tensor of the call. `own` in the order of kNumGradients.
  AttentionArguments arguments(const AttentionArguments& arguments, const std::array<bool, kNumGradients>& own) const;

  // (N B, ...) as the N (B, ...) that vmap sees.
  at::Tensor unfold(const at::Tensor& tensor, const c10::SymInt& samples) const;

  // The same for a gradient of what `mask` was given.
  at::Tensor unfold_mask(const at::Tensor& tensor, const c10::SymInt& samples, const at::Tensor& like) const;
  at::Tensor unfold_sink(const at::Tensor& tensor, const c10::SymInt& samples, const at::Tensor& like) const;

  // What there is one of for each of the N, or for all of them.
  at::Tensor unwrap(const at::Tensor& tensor) const;
  const c10::SymInt& count() const { return count_; }

 private:
  at::Tensor all(const at::Tensor& tensor) const;  // (N, ...)
  at::Tensor seeds(const at::Tensor& seed) const;

  int64_t level_ = 0;
  c10::SymInt count_ = 1;
  c10::impl::ExcludeDispatchKeyGuard below_;
};

}  // namespace mha_ext
