#include <ATen/TensorOperators.h>

#include <algorithm>
#include <limits>

#include "attention.h"

namespace mha_ext {

double softcap_of(const AttentionArguments& a) {
  const double cap = a.variants.softcap, most = a.query.scalar_type() == at::kDouble ? 1e300 : 1e30;
  return cap > 0 ? std::clamp(cap, 1 / most, most) : 0;
}

at::Tensor sink_in(const AttentionArguments& a, at::ScalarType type) {
  const double most = type == at::kDouble ? std::numeric_limits<double>::max() : std::numeric_limits<float>::max();
  return a.variants.sink.to(type).clamp_max(most);
}

at::Tensor sink_share(const at::Tensor& sink, const at::Tensor& lse) {
  const at::Tensor empty = lse.isneginf();
  return (sink.unsqueeze(-1) - lse.masked_fill(empty, 0)).exp().masked_fill(empty, 0);
}

AttentionArguments on_keys(const PagedArguments& a, const at::Tensor& key, const at::Tensor& value) {
  AttentionArguments arguments{a.query, key, value, {}, {}, {}};
  arguments.scale = a.scale;
  arguments.variants = {a.key_range, {}, a.sink, kNoLimit, kNoLimit, a.softcap};
  return arguments;
}

at::Tensor gather_pages(const at::Tensor& pages, const at::Tensor& page_table) {
  const at::Tensor rows = pages.index_select(0, page_table.flatten());
  return rows.unflatten_symint(0, page_table.sym_sizes()).transpose(1, 2).flatten(2, 3);
}

}  // namespace mha_ext
