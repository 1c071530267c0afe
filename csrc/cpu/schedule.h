// How the work of one call is cut into units. Sizes in, sizes out: no tensors, no threads. A unit's result depends on
// the shape alone, never on how many threads share the units, so results are the same to the bit for any thread count.
#pragma once

#include <cstdint>

namespace mha_ext::cpu {

// Queries of one head in blocks of at most `kernels::kBlockQueries`, as even as whole vectors allow: 65 queries run as
// 48 + 17 on 16 lanes, not as 64 + 1.
int64_t query_block_size(int64_t num_queries, int64_t vector_width);

// Keys of one key/value head in backward: with few heads they are cut into ranges, so that more threads than heads can
// work; each range adds its share of dQ in a fixed order. Returns keys a range.
int64_t key_range_size(int64_t batch_times_kv_heads, int64_t num_keys);

// Units handed to one thread at a time, so that a task is worth the hand-over (about 20 us).
int64_t units_per_task(double multiply_adds_per_unit);

inline int64_t divide_up(int64_t n, int64_t step) { return (n + step - 1) / step; }

}  // namespace mha_ext::cpu
