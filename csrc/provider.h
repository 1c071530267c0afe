// PyTorch's own attention on CPU, computed by our kernels from install() to uninstall().
#pragma once

namespace mha_ext {

// Both may be called at any time from any thread, and again; a call that is under way ends as it began.
void install_provider();
void uninstall_provider();

}  // namespace mha_ext
