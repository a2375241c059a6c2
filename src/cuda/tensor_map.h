#pragma once

#include "abi/args.h"
#include "cuda/driver.h"
#include "launch/tensor_maps.h"

namespace flash_attention::cuda {

/// The hardware's form of a tensor map, until this thread's next call. Throws Error(internal) that names what the driver
/// would refuse.
const abi::TensorMap& tensor_map(const Driver& cu, const launch::TensorMapSpec& spec);

}  // namespace flash_attention::cuda
