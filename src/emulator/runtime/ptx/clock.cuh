#pragma once

// Emulated: kernels/ptx/clock.cuh. An emulated SM has no clock.

namespace flash_attention::ptx {

inline unsigned long long clock() { return 0; }

}  // namespace flash_attention::ptx
