// Runs amx.cpp's kernels twice over a few problems, by its instructions and by their emulation in C++, and compares to
// the bit. Without AMX the instructions are caught (traps.cpp).
#include <stdint.h>
#include <stdio.h>
#include <string.h>

#include <vector>

#include "cpu/amx_support.h"
#include "cpu/kernels/kernel_table.h"

using namespace mha_ext::kernels;

void catch_amx_instructions();
bool tiles_are_configured();

namespace mha_ext::kernels {
KernelTable with_emulated_amx(const KernelTable&);  // amx.cpp, compiled a second time
}

namespace {

struct Problem {
  int64_t queries, keys, head_dim, value_dim;
  bool causal;
};

constexpr Problem kProblems[] = {
    {1, 1, 1, 1, false},      {17, 33, 8, 5, false},   {64, 64, 64, 64, true},    {130, 66, 24, 40, true},
    {48, 63, 128, 96, false}, {33, 257, 80, 33, true}, {128, 128, 32, 64, false},
};

// Numbers of bfloat16 in (-1, 1) that repeat for nobody: the upper halves of a linear congruential sequence.
std::vector<uint16_t> numbers(int64_t count, uint32_t seed) {
  std::vector<uint16_t> result(static_cast<size_t>(count));
  for (uint16_t& half : result) {
    seed = seed * 1664525u + 1013904223u;
    const float x = static_cast<float>(static_cast<int32_t>(seed)) * 0x1p-31f;
    uint32_t bits;
    memcpy(&bits, &x, sizeof(bits));
    half = static_cast<uint16_t>(bits >> 16);
  }
  return result;
}

template <typename View, typename Data>
View rows(Data* data, int64_t count, int64_t cols, ElementType type) {
  View view;
  view.data = data, view.type = type;
  view.stride_b = view.stride_h = count * cols, view.stride_t = cols, view.stride_d = 1;
  return view;
}

constexpr ElementType kHalf = ElementType::BFloat16;

std::vector<char> results(const KernelTable& table, const Problem& p) {
  const auto q = numbers(p.queries * p.head_dim, 1), k = numbers(p.keys * p.head_dim, 2),
             v = numbers(p.keys * p.value_dim, 3), grad = numbers(p.queries * p.value_dim, 4);
  std::vector<uint16_t> out(grad.size()), grad_q(q.size()), grad_k(k.size()), grad_v(v.size());
  std::vector<float> lse(static_cast<size_t>(p.queries));
  ForwardParams f;
  AttentionParams& a = f.attention;
  a.query = rows<TensorView>(q.data(), p.queries, p.head_dim, kHalf);
  a.key = rows<TensorView>(k.data(), p.keys, p.head_dim, kHalf);
  a.value = rows<TensorView>(v.data(), p.keys, p.value_dim, kHalf);
  a.batch = a.heads = a.kv_heads = 1;
  a.num_queries = p.queries, a.num_keys = p.keys, a.head_dim = p.head_dim, a.value_dim = p.value_dim;
  a.causal = p.causal, a.scale = 0.3;
  f.out = rows<MutableTensorView>(out.data(), p.queries, p.value_dim, kHalf);
  f.lse = lse.data();
  std::vector<char> room(table.forward_scratch_bytes(a) + 64);
  const auto scratch = [&] {
    return reinterpret_cast<void*>((reinterpret_cast<uintptr_t>(room.data()) + 63) / 64 * 64);
  };
  for (int64_t begin = 0; begin < p.queries; begin += kBlockQueries) {
    const int64_t left = p.queries - begin;
    table.forward_block(f, {0, 0, begin, left < kBlockQueries ? left : kBlockQueries}, scratch());
  }

  BackwardParams b;
  b.attention = a;
  b.out = rows<TensorView>(out.data(), p.queries, p.value_dim, kHalf);
  b.grad_out = rows<TensorView>(grad.data(), p.queries, p.value_dim, kHalf);
  b.lse = lse.data();
  b.grad_query = rows<MutableTensorView>(grad_q.data(), p.queries, p.head_dim, kHalf);
  b.grad_key = rows<MutableTensorView>(grad_k.data(), p.keys, p.head_dim, kHalf);
  b.grad_value = rows<MutableTensorView>(grad_v.data(), p.keys, p.value_dim, kHalf);
  b.range_keys = (p.keys + kBlockKeys - 1) / kBlockKeys * kBlockKeys;
  room.resize(table.backward_scratch_bytes(a, p.keys) + 64);
  table.backward_range(b, {0, 0, 0, p.keys}, scratch());

  std::vector<char> bytes;
  const auto add = [&](const auto& values) {
    const char* first = reinterpret_cast<const char*>(values.data());
    bytes.insert(bytes.end(), first, first + values.size() * sizeof(values[0]));
  };
  add(out), add(lse), add(grad_q), add(grad_k), add(grad_v);
  return bytes;
}

}  // namespace

int main() {
  const bool has_amx = mha_ext::cpu::has_amx();
  if (!has_amx) catch_amx_instructions();
  const KernelTable real = with_amx({}), emulated = with_emulated_amx({});
  int different = 0;
  for (const Problem& p : kProblems) {
    if (results(real, p) == results(emulated, p)) continue;
    printf("%d x %d, %d, %d%s differs\n", static_cast<int>(p.queries), static_cast<int>(p.keys),
           static_cast<int>(p.head_dim), static_cast<int>(p.value_dim), p.causal ? ", causal" : "");
    ++different;
  }
  if (tiles_are_configured()) printf("tiles were not released\n"), ++different;
  printf("%d problems, instructions %s\n", static_cast<int>(sizeof(kProblems) / sizeof(kProblems[0])),
         has_amx ? "run by the processor" : "caught");
  return different == 0 ? 0 : 1;
}
