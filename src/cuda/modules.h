#pragma once

#include "cuda/driver.h"
#include "jit/kernel_key.h"

namespace flash_attention::cuda {

/// The kernel for one launch of a plan, ready to be launched on that GPU; null if it has not been loaded.
Function find_function(const jit::KernelKey& key, const Launch& launch, int device);

/// The same, but loads the kernel if needed, which may compile it. A kernel is loaded once in a process, and stays. A
/// context of the GPU must be current.
Function load_function(const Driver& cu, const jit::KernelKey& key, const Launch& launch, int device);

}  // namespace flash_attention::cuda
