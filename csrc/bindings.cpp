// The Python module mha_ext._C. Importing it registers the operators; it takes and returns no tensors.
#include <c10/util/Exception.h>
#include <pybind11/pybind11.h>
#include <torch/headeronly/version.h>

#include <string>

#include "cpu/dispatch.h"
#include "direct_calls.h"
#include "provider.h"

namespace {

namespace py = pybind11;

py::list available_cpu_capabilities() {
  py::list names;
  for (const std::string& name : mha_ext::cpu::available_cpu_capabilities()) names.append(name);
  return names;
}

void set_cpu_capability(const std::string& name) {
  try {
    mha_ext::cpu::set_cpu_capability(name);
  } catch (const c10::ValueError& error) {
    throw py::value_error(error.what_without_backtrace());
  }
}

py::dict build_info() {
  py::dict info;
  info["torch"] = TORCH_VERSION;
  info["compiler"] = __VERSION__;
#ifdef MHA_EXT_EMULATE_AVX512
  info["emulated"] = "avx512, avx512_bf16, amx";
#elif defined(MHA_EXT_EMULATE_AMX)
  info["emulated"] = "amx";
#endif
  return info;
}

}  // namespace

PYBIND11_MODULE(_C, m) {
  m.doc() = "The compiled part of mha_ext: operators under torch.ops.mha_ext, and the kernels' instruction set.";
  m.def("cpu_capability", &mha_ext::cpu::cpu_capability, "Name of the instruction set that the kernels run with.");
  m.def("available_cpu_capabilities", &available_cpu_capabilities, "Names that this processor can run, weakest first.");
  m.def("set_cpu_capability", &set_cpu_capability, py::arg("name"), "Run the kernels with this one.");
  m.def("install_provider", &mha_ext::install_provider, "Compute PyTorch's own attention on CPU with the kernels.");
  m.def("uninstall_provider", &mha_ext::uninstall_provider, "Give PyTorch its own attention back.");
  mha_ext::add_direct_calls(m.ptr());
  m.def("build_info", &build_info, "What the extension was built for and with.");
}
