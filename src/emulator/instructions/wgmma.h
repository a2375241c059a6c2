#pragma once

#include "emulator/runtime/interface.h"

namespace flash_attention::emulator {

// Asynchronous warpgroup products. A thread only hands over its part and goes on; it meets the others in wgmma_wait.
void wgmma(const WgmmaOperand& operand);
void wgmma_fence();
void wgmma_commit();
void wgmma_wait(int pending);

}  // namespace flash_attention::emulator
