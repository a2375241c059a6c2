#pragma once

#include "emulator/runtime/interface.h"

namespace flash_attention::emulator {

const char* name_of(WarpOp op);

/// Table::warp: the running thread arrives at a warp-wide instruction, and goes on when all lanes have arrived.
void warp_op(WarpOp op, void* operand);

}  // namespace flash_attention::emulator
