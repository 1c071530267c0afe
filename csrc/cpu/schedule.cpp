#include "schedule.h"

#include <algorithm>

#include "kernels/params.h"

namespace mha_ext::cpu {
namespace {

// A head is cut while there are fewer units than this; enough for 8 threads to stay busy, and dQ's partial sums
// (one copy of dQ a range) stay at 8 heads' worth.
constexpr int64_t kWantedRanges = 8;
constexpr int64_t kSmallestRange = 512;

// One core makes at least some 1e10 multiply-adds a second with vectors.
constexpr double kMultiplyAddsPerTask = 2e5;

}  // namespace

int64_t query_block_size(int64_t num_queries, int64_t vector_width) {
  const int64_t blocks = std::max<int64_t>(1, divide_up(num_queries, kernels::kBlockQueries));
  return std::max<int64_t>(1, divide_up(divide_up(num_queries, blocks), vector_width)) * vector_width;
}

int64_t key_range_size(int64_t batch_times_kv_heads, int64_t num_keys) {
  const int64_t wanted = divide_up(kWantedRanges, std::max<int64_t>(1, batch_times_kv_heads));
  const int64_t ranges = std::clamp<int64_t>(num_keys / kSmallestRange, 1, wanted);
  return divide_up(divide_up(num_keys, ranges), kernels::kBlockKeys) * kernels::kBlockKeys;
}

int64_t units_per_task(double multiply_adds_per_unit) {
  return static_cast<int64_t>(std::clamp(kMultiplyAddsPerTask / std::max(1.0, multiply_adds_per_unit), 1.0, 1e6));
}

}  // namespace mha_ext::cpu
