#pragma once

#include <cstdint>
#include <deque>
#include <memory>
#include <vector>

#include "emulator/checks/races.h"
#include "emulator/machine/async.h"
#include "emulator/runtime/interface.h"

namespace flash_attention::emulator {

struct Block;
struct Thread;

/// The fp32 result of products in flight, taken out of the threads' registers until they wait for it.
struct Accumulator {
  int n = 0;
  std::vector<float> values;  // [64][n]
  float* registers[128] = {};
};

/// One wgmma. Its 128 threads deliver their parts one by one; the last one issues it.
struct Wgmma {
  WgmmaOperand shape{};               // from the first thread
  std::vector<unsigned> a_registers;  // [128][4] if A is in registers
  std::shared_ptr<Accumulator> accumulator;
  int deposits = 0;
  Clocks known;  // by the first lane of each warp when it delivered its part
};

struct Warpgroup {
  Block* block = nullptr;
  std::deque<Wgmma> ops;       // not yet executed; in order
  std::uint64_t executed = 0;  // ops before this are done
  std::uint64_t issued = 0;    // ops before this have been delivered by all 128 threads
};

/// A thread's view of its warpgroup's products.
struct WarpgroupThread {
  struct InFlight {
    std::shared_ptr<Accumulator> accumulator;
    std::uint64_t end;  // ops of this thread up to its last use
  };
  struct RegisterOperand {
    const unsigned* registers;
    unsigned values[4];
    std::uint64_t end;
  };
  std::uint64_t ops = 0;               // this thread's
  std::vector<std::uint64_t> commits;  // ops before each commit
  std::vector<InFlight> in_flight;
  std::vector<RegisterOperand> operands;
  bool fenced = false;
};

}  // namespace flash_attention::emulator
