#include "emulator/machine/address.h"

#include <string>

namespace flash_attention::emulator {

SharedPlace locate(unsigned address, std::size_t bytes, std::size_t alignment) {
  Scheduler& scheduler = Scheduler::current();
  Block* block = scheduler.running().block;
  const unsigned rank = address >> cluster_rank_shift;
  if (rank > scheduler.blocks().size()) scheduler.fail("there is no block " + std::to_string(rank - 1) + " in the cluster");
  if (rank != 0) block = &scheduler.blocks()[rank - 1];
  if (block->alive == 0)
    scheduler.fail("block " + std::to_string(rank - 1) + " of the cluster has ended, its shared memory is gone");
  const std::size_t window_address = address & ((1u << cluster_rank_shift) - 1);
  const std::size_t size = block->shared.size();
  if (window_address < shared_window || window_address - shared_window + bytes > size) {
    scheduler.fail(std::to_string(bytes) + " bytes at shared offset " +
                   std::to_string(static_cast<long long>(window_address) - shared_window) + " are outside the block's " +
                   std::to_string(size) + " bytes");
  }
  if (window_address % alignment != 0) {
    scheduler.fail("shared offset " + std::to_string(window_address - shared_window) + " is not a multiple of " +
                   std::to_string(alignment));
  }
  return {block, window_address - shared_window};
}

unsigned address_of(const void* pointer) {
  Scheduler& scheduler = Scheduler::current();
  const SharedMemory& shared = scheduler.running().block->shared;
  const std::ptrdiff_t offset = static_cast<const unsigned char*>(pointer) - shared.generic();
  if (offset < 0 || static_cast<std::size_t>(offset) > shared.size()) {
    scheduler.running().doing = "shared_address";
    scheduler.fail("the pointer is not into the block's shared memory");
  }
  return static_cast<unsigned>(offset) + shared_window;
}

}  // namespace flash_attention::emulator
