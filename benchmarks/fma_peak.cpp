// Multiply-adds and nothing else: what a processor can do at most. Built by fma_peak.py.

namespace {

// Enough independent sums for two units of latency five, few enough for 16 registers.
constexpr int SUMS = 12;
constexpr int BYTES = VECTOR_BYTES;

template <typename Number>
double run(long steps) {
  constexpr int lanes = BYTES / sizeof(Number);
  typedef Number Vector __attribute__((vector_size(BYTES)));
  const Vector none = {};
  const Vector factor = none + Number(0.5), addend = none + Number(1);
  Vector sum[SUMS];
#pragma GCC unroll 12
  for (int i = 0; i < SUMS; ++i) sum[i] = none + Number(steps + i);  // unknown here: nothing is computed beforehand
  for (long step = 0; step < steps; ++step) {
#pragma GCC unroll 12
    for (int i = 0; i < SUMS; ++i) sum[i] = sum[i] * factor + addend;
  }
  Vector total = none;
#pragma GCC unroll 12
  for (int i = 0; i < SUMS; ++i) total += sum[i];  // unrolled like the rest, so that the sums stay in registers
  double result = 0;
  for (int lane = 0; lane < lanes; ++lane) result += total[lane];
  return result;
}

}  // namespace

extern "C" {

// Floating-point operations of one step.
long fma_step_operations(int bytes) { return 2L * SUMS * (BYTES / bytes); }

double fma_fp32(long steps) { return run<float>(steps); }

double fma_fp64(long steps) { return run<double>(steps); }
}
