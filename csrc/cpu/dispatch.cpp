#include "dispatch.h"

#include <c10/util/Exception.h>

#include <atomic>
#include <cstdlib>

#include "amx_support.h"

namespace mha_ext::cpu {
namespace {

using kernels::InstructionSet;

#ifdef MHA_EXT_AVX512_BF16
const InstructionSet& avx512_bf16() {
  static const InstructionSet set{"avx512_bf16", kernels::kAvx512.float32, kernels::kAvx512.float64,
                                  &kernels::kAvx512Bf16};
  return set;
}
#endif

#ifdef MHA_EXT_AMX
const InstructionSet& amx() {
  static const kernels::KernelTable bfloat16 = kernels::with_amx(kernels::kAvx512.float32);
  static const InstructionSet set{"amx", kernels::kAvx512.float32, kernels::kAvx512.float64, &bfloat16};
  return set;
}
#endif

#ifdef MHA_EXT_EMULATE_AVX512
constexpr bool kEmulatesAvx512 = true;
#else
constexpr bool kEmulatesAvx512 = false;
#endif

// Weakest first; each supposes the one before, but AMX not AVX512_BF16. Without the macro the compiler did not have the
// instructions.
std::vector<const InstructionSet*> find_available() {
  std::vector<const InstructionSet*> sets = {&kernels::kPortable};
#ifdef MHA_EXT_AVX2
  __builtin_cpu_init();
  if (!__builtin_cpu_supports("avx2") || !__builtin_cpu_supports("fma") || !__builtin_cpu_supports("f16c")) return sets;
  sets.push_back(&kernels::kAvx2);
#endif
#ifdef MHA_EXT_AVX512
  if (!kEmulatesAvx512 && (!__builtin_cpu_supports("avx512f") || !__builtin_cpu_supports("avx512bw") ||
                           !__builtin_cpu_supports("avx512vl") || !__builtin_cpu_supports("avx512dq"))) {
    return sets;
  }
  sets.push_back(&kernels::kAvx512);
#endif
#ifdef MHA_EXT_AVX512_BF16
  if (kEmulatesAvx512 || __builtin_cpu_supports("avx512bf16")) sets.push_back(&avx512_bf16());
#endif
#ifdef MHA_EXT_AMX
  if (has_amx()) sets.push_back(&amx());
#endif
  return sets;
}

const std::vector<const InstructionSet*>& available() {
  static const std::vector<const InstructionSet*> sets = find_available();
  return sets;
}

// `argument` is what the name was given as, for the message.
const InstructionSet* find(const std::string& name, const char* argument) {
  std::string names;
  for (const InstructionSet* set : available()) {
    if (name == set->name) return set;
    names += names.empty() ? set->name : std::string(", ") + set->name;
  }
  TORCH_CHECK_VALUE(false, argument, " must be one of ", names, " on this processor, got '", name, "'");
}

const InstructionSet* choose() {
  const char* forced = std::getenv("MHA_EXT_CPU_CAPABILITY");
  if (forced != nullptr && forced[0] != '\0') return find(forced, "MHA_EXT_CPU_CAPABILITY");
  const InstructionSet* best = available().back();
#ifdef MHA_EXT_AVX512_BF16
  // Intel's processors were measured to multiply bfloat16 at half the speed of float32 with AVX-512 (Xeon with AMX, the
  // figure of a prototype); AMD's (Zen 4) at twice.
  if (best == &avx512_bf16() && __builtin_cpu_is("intel")) return &kernels::kAvx512;
#endif
  return best;
}

std::atomic<const InstructionSet*>& current() {
  static std::atomic<const InstructionSet*> set{choose()};
  return set;
}

}  // namespace

const InstructionSet& instruction_set() { return *current().load(std::memory_order_relaxed); }

const char* cpu_capability() { return instruction_set().name; }

std::vector<std::string> available_cpu_capabilities() {
  std::vector<std::string> names;
  for (const InstructionSet* set : available()) names.emplace_back(set->name);
  return names;
}

void set_cpu_capability(const std::string& name) {
  current().store(find(name, "set_cpu_capability: name"), std::memory_order_relaxed);
}

}  // namespace mha_ext::cpu
