// Units of work shared by threads as they become free. Which thread runs a unit does not change its result.
#pragma once

#include <ATen/Parallel.h>
#include <c10/core/CPUAllocator.h>

#include <algorithm>
#include <atomic>

#include "schedule.h"

namespace mha_ext::cpu {

// Threads that a call may use.
inline int64_t thread_count() { return at::in_parallel_region() ? 1 : at::get_num_threads(); }

// Calls run(unit, scratch) once for every unit in [0, units); each thread has one scratch buffer of its own.
template <typename Run>
void parallel_units(int64_t units, double multiply_adds_per_unit, size_t scratch_bytes, const Run& run) {
  if (units == 0) return;
  const int64_t step = units_per_task(multiply_adds_per_unit);
  std::atomic<int64_t> next{0};
  const auto drain = [&] {
    const at::DataPtr scratch = c10::GetCPUAllocator()->allocate(scratch_bytes);
    for (int64_t begin = next.fetch_add(step); begin < units; begin = next.fetch_add(step)) {
      for (int64_t unit = begin; unit < std::min(begin + step, units); ++unit) run(unit, scratch.get());
    }
  };
  const int64_t threads = std::min(thread_count(), divide_up(units, step));
  if (threads <= 1) {
    drain();
  } else {
    at::parallel_for(0, threads, 1, [&](int64_t, int64_t) { drain(); });
  }
}

}  // namespace mha_ext::cpu
