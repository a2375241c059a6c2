#pragma once

namespace flash_attention::emulator {

// What a warp does with tensor memory (tcgen05.alloc, ld, st and their like); operands are those of its 32 lanes,
// TensorMemoryOperand each.
void tmem_alloc(void* const* operands);
void tmem_relinquish();
void tmem_dealloc(void* const* operands);
void tmem_load(void* const* operands);
void tmem_store(void* const* operands);
void tmem_wait_load();
void tmem_wait_store();

}  // namespace flash_attention::emulator
