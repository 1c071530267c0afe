#include "schedule.h"

#include <algorithm>

namespace mha_ext::cpu {
namespace {

// Ranges of all key/value heads of one sample: enough for 8 threads to stay busy. Each has a share of dQ for every
// query head of its group; that many shares of a head's size may a sample have.
constexpr int64_t kWantedRanges = 8, kMostShares = 16;
constexpr int64_t kSmallestRange = 512;

// So many units a thread that the last ones to finish wait little for one another.
constexpr int64_t kBlocksPerThread = 4, kHeadsPerThread = 3;

// Units with weights are long. So many keep 4 threads busy, and T = 128 runs on 32 lanes (16 took 5 % more time).
constexpr int64_t kWantedUnits = 4;
// Their scratch is two numbers a key and query, 1 MiB here. At T = 1024 the narrower blocks took 8 % more time: they
// read K and V of all heads twice as often.
constexpr int64_t kKeysForWideBlocks = 1024;

// One core makes at least some 1e10 multiply-adds a second with vectors.
constexpr double kMultiplyAddsPerTask = 2e5;

// Beyond, the other kernel is as fast or faster whatever the instruction set (see few_sixteenths).
constexpr int64_t kMostFew = 12;

// A range is worth a hand-over between threads: one query reads 256 KiB of it at D = 64 in float.
constexpr int64_t kFewRange = 512;

}  // namespace

bool runs_as_few(int64_t num_queries, const kernels::KernelTable& kernel) {
  const int64_t lanes = divide_up(num_queries, kernel.vector_width) * kernel.vector_width;
  return num_queries >= 1 && num_queries <= kMostFew && 16 * num_queries <= kernel.few_sixteenths * lanes;
}

int64_t few_range_size(int64_t num_keys) {
  const int64_t ranges = std::max<int64_t>(1, divide_up(num_keys, kFewRange));
  return std::max<int64_t>(1, divide_up(divide_up(num_keys, ranges), kernels::kBlockKeys)) * kernels::kBlockKeys;
}

int64_t most_forward_queries(int64_t num_queries, int64_t rows, int64_t threads) {
  const bool few = rows * divide_up(num_queries, kernels::kBlockQueries) < kBlocksPerThread * threads;
  return few && threads > 1 ? kernels::kBlockQueries / 2 : kernels::kBlockQueries;
}

int64_t query_block_size(int64_t num_queries, int64_t vector_width, int64_t most) {
  const int64_t blocks = std::max<int64_t>(1, divide_up(num_queries, most));
  const int64_t step = blocks > 1 ? std::max(vector_width, kernels::kMapQueries) : vector_width;
  return std::max<int64_t>(1, divide_up(divide_up(num_queries, blocks), step)) * step;
}

int64_t most_weights_queries(int64_t num_queries, int64_t num_keys, int64_t rows) {
  const int64_t most = num_keys <= kKeysForWideBlocks ? kernels::kBlockQueries : kernels::kBlockQueries / 2;
  const int64_t wanted = divide_up(kWantedUnits, std::max<int64_t>(1, rows));
  return std::clamp<int64_t>(divide_up(num_queries, wanted), 1, most);
}

int64_t key_range_size(int64_t heads, int64_t kv_heads, int64_t num_keys) {
  const int64_t wanted = std::min(divide_up(kWantedRanges, std::max<int64_t>(1, kv_heads)),
                                  std::max<int64_t>(1, kMostShares / std::max<int64_t>(1, heads)));
  const int64_t ranges = std::clamp<int64_t>(num_keys / kSmallestRange, 1, wanted);
  return divide_up(divide_up(num_keys, ranges), kernels::kBlockKeys) * kernels::kBlockKeys;
}

bool splits_heads(int64_t rows, int64_t threads) { return threads > 1 && rows < kHeadsPerThread * threads; }

int64_t units_per_task(double multiply_adds_per_unit) {
  return static_cast<int64_t>(std::clamp(kMultiplyAddsPerTask / std::max(1.0, multiply_adds_per_unit), 1.0, 1e6));
}

}  // namespace mha_ext::cpu
