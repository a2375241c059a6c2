#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "emulator/checks/tensor_order.h"
#include "emulator/machine/async.h"
#include "emulator/runtime/interface.h"

namespace flash_attention::emulator {

/// A place in tensor memory.
struct TensorPlace {
  unsigned lane, column;

  explicit TensorPlace(unsigned address) : lane(address >> 16), column(address & 0xffff) {}
};

/// One tcgen05.mma.
struct TensorProduct {
  TensorProductOperand operand;
  AccumulatorKey key;
  bool done = false;
};

/// A load that its warp has not waited for: the registers of its lanes hold poison.
struct TensorLoad {
  TaskHandle task{};
  std::shared_ptr<std::vector<std::uint32_t>> values{};  // [lane][column]
  int columns = 0;
  unsigned* registers[32] = {};
};

/// What a warp has under way.
struct TensorWarp {
  std::vector<TensorLoad> loads;
  std::vector<TaskHandle> stores;
};

/// The tensor memory of a block, of sm_100 and up. It is made by the block's first allocation.
struct TensorMemory {
  static constexpr unsigned lanes = 128, columns = 512, unit = 32;  // columns are allocated in units

  std::vector<std::uint32_t> cells;          // [lane][column]
  std::map<unsigned, unsigned> allocations;  // first column and number
  bool relinquished = false;
  std::vector<TensorWarp> warps;
  std::vector<TensorProduct> products;  // number 1 and on; all that were issued
  std::size_t first_open = 0;           // those before it are done
  int issuer = -1;                      // the thread that issues products
  TensorOrder order;

  bool exists() const { return !cells.empty(); }
  float* row(unsigned lane) { return reinterpret_cast<float*>(cells.data() + lane * columns); }
  bool holds(unsigned column, unsigned count) const;  ///< they are allocated
};

/// An error about what the block left when it ended; empty if it left nothing.
std::string what_is_left(const TensorMemory& tensor);

}  // namespace flash_attention::emulator
