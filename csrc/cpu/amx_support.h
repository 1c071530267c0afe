#pragma once

namespace mha_ext::cpu {

// Whether this process may use AMX for bfloat16: the processor has it, and Linux gives the permission, which is asked
// for here once and holds for all threads and for processes forked later (Linux 5.16 and newer).
bool has_amx();

}  // namespace mha_ext::cpu
