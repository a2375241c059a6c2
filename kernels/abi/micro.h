#pragma once

// The configuration of a micro-benchmark (kernels/micro). Plain data: no includes, the same on host and device.

namespace flash_attention::abi {

struct MicroConfig {
  int warpgroups = 1;      // of 128 threads, in a block
  int n = 64;              // wgmma: columns of a product
  bool registers = false;  // wgmma: A from registers instead of shared memory; reduce: red.v4 instead of bulk copies
  int polynomials = 0;     // exp2: how many of 8 exponentials use FMA instead of the special function unit
  bool named = false;      // handoff: named barriers instead of mbarriers
};

/// Each block writes the clock cycles of its measured part to 64-bit words of the workspace.
constexpr int micro_repeat = 256;

}  // namespace flash_attention::abi
