#pragma once

#include <cstddef>

#include "emulator/machine/scheduler.h"

namespace flash_attention::emulator {

/// A place in the shared memory of a block of the cluster.
struct SharedPlace {
  Block* block;
  std::size_t offset;
  unsigned char* generic() const { return block->shared.generic() + offset; }
};

/// The place of `bytes` bytes at a shared address. Refuses an address out of range or not a multiple of `alignment`.
SharedPlace locate(unsigned address, std::size_t bytes, std::size_t alignment);

/// The shared address of a pointer into the running thread's shared memory.
unsigned address_of(const void* pointer);

/// Where TMA and wgmma store the byte of an address if rows of `span` bytes (0: not swizzled, 32, 64 or 128) are
/// swizzled: the number of its 16-byte chunk is xor-ed with that of its 128-byte line.
constexpr std::size_t swizzle(std::size_t address, int span) {
  const std::size_t mask = span == 128 ? 7 : span == 64 ? 3 : span == 32 ? 1 : 0;
  return address ^ ((address >> 7 & mask) << 4);
}

}  // namespace flash_attention::emulator
