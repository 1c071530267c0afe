#include "amx_support.h"

#if defined(MHA_EXT_AMX) && defined(__linux__) && !defined(MHA_EXT_EMULATE_AMX)
#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>

namespace mha_ext::cpu {
namespace {

constexpr unsigned kTile = 1u << 24, kBFloat16 = 1u << 22;   // of EDX, leaf 7
constexpr long kRequestPermission = 0x1023, kTileData = 18;  // arch_prctl's ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA

bool processor_has_amx() {
  unsigned eax = 0, ebx = 0, ecx = 0, edx = 0;
  return __get_cpuid_count(7, 0, &eax, &ebx, &ecx, &edx) != 0 && (edx & kTile) != 0 && (edx & kBFloat16) != 0;
}

}  // namespace

bool has_amx() {
  static const bool has = processor_has_amx() && syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
  return has;
}

}  // namespace mha_ext::cpu
#else
namespace mha_ext::cpu {

#ifdef MHA_EXT_EMULATE_AMX
bool has_amx() { return true; }
#else
bool has_amx() { return false; }
#endif

}  // namespace mha_ext::cpu
#endif
