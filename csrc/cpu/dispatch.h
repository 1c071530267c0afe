// Which instruction set the kernels run with: the best the processor has, or the one forced by name.
#pragma once

#include <string>
#include <vector>

#include "kernels/kernel_table.h"

namespace mha_ext::cpu {

// The set in use. The first call chooses; MHA_EXT_CPU_CAPABILITY in the environment forces one by name.
const kernels::InstructionSet& instruction_set();

const char* cpu_capability();
std::vector<std::string> available_cpu_capabilities();  // weakest first
void set_cpu_capability(const std::string& name);       // ValueError names the available ones

}  // namespace mha_ext::cpu
