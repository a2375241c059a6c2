#pragma once

#include "emulator/runtime/interface.h"

namespace flash_attention::emulator {

/// The library's side of the instructions, handed to each unit when it is loaded.
const Table& runtime_table();

}  // namespace flash_attention::emulator
