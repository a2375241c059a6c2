#include "emulator/machine/tensor_memory.h"

#include <algorithm>

namespace flash_attention::emulator {

bool TensorMemory::holds(unsigned column, unsigned count) const {
  const auto after = allocations.upper_bound(column);
  if (after == allocations.begin()) return false;
  const auto& [first, size] = *std::prev(after);
  return column + count <= first + size;
}

std::string what_is_left(const TensorMemory& tensor) {
  for (std::size_t warp = 0; warp < tensor.warps.size(); ++warp) {
    const std::string of = " of warp " + std::to_string(warp) + " was in flight";
    if (!tensor.warps[warp].loads.empty()) return "while a tmem_load" + of + " (tmem_wait_load is missing)";
    if (!tensor.warps[warp].stores.empty()) return "while a tmem_store" + of + " (tmem_wait_store is missing)";
  }
  if (!tensor.allocations.empty()) {
    return "with " + std::to_string(tensor.allocations.begin()->second) +
           " columns of tensor memory (tmem_dealloc is missing): the next block would wait for ever";
  }
  return {};
}

}  // namespace flash_attention::emulator
