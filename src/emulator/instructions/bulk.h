#pragma once

#include "emulator/runtime/interface.h"

namespace flash_attention::emulator {

// The bulk engine: TMA boxes and runs of bytes.
void bulk_load(const BulkOperand& operand);
void bulk_store(const BulkOperand& operand);
void bulk_commit();
void bulk_wait(int pending, bool read);
void fence_proxy_async();

}  // namespace flash_attention::emulator
