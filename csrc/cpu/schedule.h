// How the work of one call is cut into units. Sizes in, sizes out: no tensors. What a unit computes for one query, or
// one key, does not depend on the cut, so results are the same to the bit for any thread count and any split of the
// batch.
#pragma once

#include <cstdint>

#include "kernels/kernel_table.h"

namespace mha_ext::cpu {

// Queries of one head in blocks of at most `most`, as even as whole vectors allow: 129 queries run as 80 + 49 on 16
// lanes with `most` 128, not as 128 + 1.
// Several blocks begin at rows of a mask's map (kMapQueries).
int64_t query_block_size(int64_t num_queries, int64_t vector_width, int64_t most);

// `most` for the forward pass, where blocks of queries are the units: halved where they are few for the threads. `rows`
// is batch x heads.
int64_t most_forward_queries(int64_t num_queries, int64_t rows, int64_t threads);

// `most` where the weights are wanted and a unit is a block of queries of a whole group of heads, whose scratch grows
// with the keys. `rows` is batch x groups.
int64_t most_weights_queries(int64_t num_queries, int64_t num_keys, int64_t rows);

// Whether so few queries run with lanes along the head instead of along the queries.
bool runs_as_few(int64_t num_queries, const kernels::KernelTable& kernel);

// Keys a range for few queries, forward and backward. It depends on nothing else, so that one head alone gives the same
// to the bit as among others.
int64_t few_range_size(int64_t num_keys);

// Keys of one key/value head in backward come in ranges, so that with few heads more threads can work. Each range has
// its share of dQ, and the shares are added in order, by one thread or by many. Returns keys a range; a multiple of
// `kernels::kBlockKeys`.
int64_t key_range_size(int64_t heads, int64_t kv_heads, int64_t num_keys);

// Whether ranges are units of work; else a whole head is. `rows` is batch x key/value heads.
bool splits_heads(int64_t rows, int64_t threads);

// Units handed to one thread at a time, so that a task is worth the hand-over (about 20 us).
int64_t units_per_task(double multiply_adds_per_unit);

inline int64_t divide_up(int64_t n, int64_t step) { return (n + step - 1) / step; }

}  // namespace mha_ext::cpu
