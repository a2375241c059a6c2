#pragma once

#include "cuda/driver.h"
#include "jit/kernel_key.h"

namespace flash_attention::cuda {

/// The kernel for one launch of a plan, ready to be launched on that GPU; null where it has yet to be loaded.
Function find_function(const jit::KernelKey& key, const Launch& launch, int device);

/// The same, loaded where needed, which may compile. A kernel is loaded once per process and kept to its end. A context of
/// the GPU must be current.
Function load_function(const Driver& cu, const jit::KernelKey& key, const Launch& launch, int device);

}  // namespace flash_attention::cuda
