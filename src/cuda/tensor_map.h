#pragma once

#include "abi/args.h"
#include "cuda/driver.h"
#include "launch/tensor_maps.h"

namespace flash_attention::cuda {

/// The hardware's form of a tensor map, valid until this thread's next call. Throws Error(internal), which names the
/// value that the driver would refuse.
const abi::TensorMap& tensor_map(const Driver& cu, const launch::TensorMapSpec& spec);

}  // namespace flash_attention::cuda
