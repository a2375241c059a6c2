#include "emulator/checks/deadlock.h"

#include "emulator/instructions/mbarrier.h"
#include "emulator/instructions/warp_ops.h"

namespace flash_attention::emulator {
namespace {
constexpr int max_lines = 40;  // of a block
}

std::string describe_wait(const Thread& thread) {
  const Block& block = *thread.block;
  switch (thread.wait) {
    case Wait::warp:
      return std::string(name_of(thread.warp->op)) + " (" + std::to_string(thread.warp->arrived) + " of " +
             std::to_string(thread.warp->lanes.size()) + " lanes have come)";
    case Wait::barrier: {
      const NamedBarrier& barrier = block.barriers[thread.wait_key];
      return std::string(thread.doing) + ", barrier " + std::to_string(thread.wait_key) + " (" +
             std::to_string(barrier.arrived) + " of " + std::to_string(barrier.expected) + " threads have come)";
    }
    case Wait::cluster_barrier:
      return "cluster_wait";
    case Wait::mbarrier:
      return "mbarrier at shared offset " + std::to_string(thread.wait_key - shared_window) + ", parity " +
             std::to_string(thread.wait_detail) + " (" + describe_mbarrier(block, thread.wait_key) + ")";
    case Wait::wgmma:
      return "wgmma_wait (not every thread of the warpgroup has issued the product)";
    case Wait::registers:
      return "registers_increase to " + std::to_string(thread.wait_key) + " (the pool has too few)";
    case Wait::tensor_memory:
      return "tmem_alloc of " + std::to_string(thread.wait_key) + " columns (this block holds too many itself)";
    case Wait::other_block:
      return "a value that another block has to write";
    case Wait::nothing:
      break;
  }
  return thread.state == State::done ? "has ended" : "could go on";
}

std::string describe_deadlock(const std::vector<Block>& blocks, const LaunchShape& shape) {
  std::string report = "dead-lock: no thread can go on";
  for (const Block& block : blocks) {
    report += "\n  block " + to_string(block.index) + ":";
    int first = 0, lines = 0;
    std::string text = describe_wait(block.threads.front());
    for (int i = 1; i <= shape.block; ++i) {
      const std::string next = i < shape.block ? describe_wait(block.threads[static_cast<std::size_t>(i)]) : std::string();
      if (next == text) continue;
      if (++lines > max_lines) {
        report += "\n    and so on";
        break;
      }
      report += "\n    thread" + (first == i - 1 ? " " + std::to_string(first)
                                                 : "s " + std::to_string(first) + " to " + std::to_string(i - 1));
      report += ": " + text;
      first = i;
      text = next;
    }
  }
  return report;
}

}  // namespace flash_attention::emulator
