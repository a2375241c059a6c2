#pragma once

#include "cuda/driver.h"
#include "jit/kernel_key.h"

namespace flash_attention::cuda {

/// The loaded kernel for one launch of a plan on a GPU, ready to be launched in the current context. Loaded once per
/// process and kept to its end. May compile. The context must be current.
Function load_function(const Driver& cu, const jit::KernelKey& key, const Launch& launch, int device);

/// True where load_function would neither compile nor load.
bool is_loaded(const jit::KernelKey& key, const Launch& launch, int device);

}  // namespace flash_attention::cuda
