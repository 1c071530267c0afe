// Runs a package that run.py beside this file has made. No Python interpreter is started; loading the extension's
// library registers the operators that the package calls.
//
// main LIBRARY PACKAGE INPUT OUTPUT BATCH LENGTH WIDTH: INPUT and OUTPUT are files of float32 numbers.
#include <ATen/ops/empty.h>
#include <c10/core/InferenceMode.h>
#include <dlfcn.h>
#include <torch/csrc/inductor/aoti_package/model_package_loader.h>

#include <cstdlib>
#include <fstream>
#include <iostream>

int main(int argc, char** argv) {
  if (argc != 8) {
    std::cerr << "usage: " << argv[0] << " LIBRARY PACKAGE INPUT OUTPUT BATCH LENGTH WIDTH\n";
    return 2;
  }
  if (dlopen(argv[1], RTLD_NOW | RTLD_GLOBAL) == nullptr) {
    std::cerr << dlerror() << '\n';
    return 1;
  }
  const c10::InferenceMode no_gradients;
  const at::Tensor x = at::empty({std::atoll(argv[5]), std::atoll(argv[6]), std::atoll(argv[7])}, at::kFloat);
  const auto bytes = static_cast<std::streamsize>(x.nbytes());
  if (!std::ifstream(argv[3], std::ios::binary).read(static_cast<char*>(x.data_ptr()), bytes)) {
    std::cerr << argv[3] << ": fewer than " << bytes << " bytes\n";
    return 1;
  }
  torch::inductor::AOTIModelPackageLoader model(argv[2]);
  const at::Tensor out = model.run({x}).at(0).contiguous();
  std::ofstream(argv[4], std::ios::binary).write(static_cast<const char*>(out.data_ptr()), out.nbytes());
  return 0;
}
