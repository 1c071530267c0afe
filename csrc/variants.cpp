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

}  // namespace mha_ext
