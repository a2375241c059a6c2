#pragma once

#include "cuda/driver.h"
#include "plan/arguments.h"

namespace flash_attention::cuda {

/// The hardware's form of a tensor map. Throws Error(internal) that names what the driver would refuse.
void encode(const Driver& cu, const plan::TensorMapSpec& spec, abi::TensorMap& map);

}  // namespace flash_attention::cuda
