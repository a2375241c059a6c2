#pragma once

// The arguments of a program besides its indices. Plain data: no includes, the same on host and device.

namespace flash_attention::abi {

constexpr int program_tensors = 8, program_axes = 4, program_scalars = 16;

struct ProgramArgs {
  const void* tensors[program_tensors];  // dense
  int sizes[program_tensors][program_axes];
  int ints[program_scalars];     // the scalars that are ints
  float reals[program_scalars];  // the scalars that are floats

  // Backward. The gradient of a tensor is summed in integers, in units of 2^-shift: backward/program_gradients.cuh.
  long long* sums[program_tensors];  // null: no gradient is wanted
  unsigned* limits;                  // the largest term of each tensor, as the bits of a float
  float* gradients[program_tensors];
  long long counts[program_tensors];  // elements
  int room;                           // 60 minus the exponent of the number of scores: plan/program.cpp
};

}  // namespace flash_attention::abi
