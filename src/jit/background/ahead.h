#pragma once

#include <vector>

#include "jit/kernel_key.h"

namespace flash_attention::jit {

/// compiled() for each key that no cache has, by threads that no call waits for. An error is left to the call that needs
/// the kernel. A process that ends waits for what is being compiled at that moment.
void compile_ahead(std::vector<KernelKey> keys);

}  // namespace flash_attention::jit
