#pragma once

#include <vector>

#include "jit/kernel_key.h"

namespace flash_attention::jit {

/// Calls compiled() for each key that no cache has, on threads that no call waits for. The call that needs the kernel
/// reports an error. A process that ends waits for the kernel that is being compiled at that moment.
void compile_ahead(std::vector<KernelKey> keys);

}  // namespace flash_attention::jit
