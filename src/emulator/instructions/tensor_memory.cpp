#include "emulator/instructions/tensor_memory.h"

#include <algorithm>
#include <bit>
#include <cstring>
#include <memory>
#include <string>

#include "emulator/instructions/table.h"
#include "emulator/machine/address.h"
#include "emulator/machine/scheduler.h"

namespace flash_attention::emulator {
namespace {

/// What registers hold until tmem_wait_load, and columns before they are written: a NaN of our own.
constexpr std::uint32_t unread_cell = 0x7fe7a5a5;

constexpr std::uint32_t longest_wait = 32;  // for another block's columns, in turns of the warp

const TensorMemoryOperand& operand_of(void* const* operands, int lane = 0) {
  return *static_cast<const TensorMemoryOperand*>(operands[lane]);
}

std::string text(unsigned number) { return std::to_string(number); }

void require_uniform(void* const* operands) {
  for (int lane = 1; lane < 32; ++lane) {
    if (operand_of(operands, lane).address != operand_of(operands).address)
      Scheduler::current().fail("the lanes of the warp have different addresses");
  }
}

/// A block's tensor memory begins with its first allocation.
void begin(Block& block) {
  TensorMemory& tensor = block.tensor;
  if (tensor.exists()) return;
  tensor.cells.assign(std::size_t{TensorMemory::lanes} * TensorMemory::columns, unread_cell);
  tensor.warps.resize(block.warps.size());
  const auto warps = static_cast<std::uint32_t>(block.warps.size());
  tensor.order.begin(Scheduler::current().races().add_actors(2 * warps + 1), static_cast<int>(warps));
}

/// A free run of columns, any that there is: what other blocks of the SM hold decides. -1: there is none.
int find_columns(const TensorMemory& tensor, unsigned count, Random& random) {
  int found = -1;
  std::uint32_t seen = 0;
  for (unsigned first = 0; first + count <= TensorMemory::columns; first += TensorMemory::unit) {
    bool is_free = true;
    for (const auto& [start, size] : tensor.allocations)
      is_free = is_free && (first + count <= start || start + size <= first);
    if (is_free && random.below(++seen) == 0) found = static_cast<int>(first);
  }
  return found;
}

void require_columns(int columns) {
  if (columns < 32 || columns > 512 || !std::has_single_bit(static_cast<unsigned>(columns))) {
    Scheduler::current().fail(std::to_string(columns) + " columns; allowed are powers of two from 32 to 512");
  }
}

/// The place of a load or store of the running warp.
TensorPlace require_lanes(void* const* operands, TensorMemory& tensor) {
  Scheduler& scheduler = Scheduler::current();
  require_uniform(operands);
  const TensorMemoryOperand& operand = operand_of(operands);
  const TensorPlace place(operand.address);
  const auto first = static_cast<unsigned>(scheduler.running().index / 32 % 4 * 32);
  if (place.lane != first) {
    scheduler.fail("the address has lane " + text(place.lane) + "; this warp reaches the lanes from " + text(first) +
                   " to " + text(first + 31));
  }
  const auto count = static_cast<unsigned>(operand.columns);
  if (!tensor.holds(place.column, count))
    scheduler.fail("columns " + text(place.column) + " to " + text(place.column + count - 1) + " are not allocated");
  return place;
}

void fail_if(const std::string& wrong) {
  if (!wrong.empty()) Scheduler::current().fail(wrong);
}

}  // namespace

void tmem_alloc(void* const* operands) {
  Scheduler& scheduler = Scheduler::current();
  Thread& thread = scheduler.running();
  Block& block = *thread.block;
  const TensorMemoryOperand& operand = operand_of(operands);
  require_uniform(operands);
  require_columns(operand.columns);
  begin(block);
  TensorMemory& tensor = block.tensor;
  if (tensor.relinquished) scheduler.fail("the block has given up its right to allocate (tmem_relinquish)");
  // Another block of the SM may hold the columns for a while.
  for (std::uint32_t turns = scheduler.random().below(longest_wait); turns > 0; --turns) scheduler.yield();
  const auto count = static_cast<unsigned>(operand.columns);
  int first = find_columns(tensor, count, scheduler.random());
  while (first < 0) {
    scheduler.suspend(Wait::tensor_memory, count);
    first = find_columns(tensor, count, scheduler.random());
  }
  tensor.allocations[static_cast<unsigned>(first)] = count;
  const SharedPlace place = locate(operand.address, 4, 4);
  scheduler.races().write(thread, place, 4);
  const auto address = static_cast<std::uint32_t>(first);
  std::memcpy(place.generic(), &address, 4);
}

void tmem_relinquish() { Scheduler::current().running().block->tensor.relinquished = true; }

void tmem_dealloc(void* const* operands) {
  Scheduler& scheduler = Scheduler::current();
  Thread& thread = scheduler.running();
  TensorMemory& tensor = thread.block->tensor;
  require_uniform(operands);
  const TensorPlace place(operand_of(operands).address);
  const auto found = tensor.allocations.find(place.column);
  const auto count = static_cast<unsigned>(operand_of(operands).columns);
  if (place.lane != 0 || found == tensor.allocations.end() || found->second != count)
    scheduler.fail(text(count) + " columns from " + text(place.column) + " on are no allocation of this block");
  fail_if(tensor.order.release(*thread.warp, place.column, count));
  tensor.allocations.erase(found);
  scheduler.wake_where(
      [&](const Thread& other) { return other.wait == Wait::tensor_memory && other.block == thread.block; });
}

void tmem_load(void* const* operands) {
  Scheduler& scheduler = Scheduler::current();
  Thread& thread = scheduler.running();
  TensorMemory& tensor = thread.block->tensor;
  const TensorPlace place = require_lanes(operands, tensor);
  const int columns = operand_of(operands).columns;
  fail_if(tensor.order.load(*thread.warp, place.column, static_cast<unsigned>(columns)));
  TensorLoad load{.columns = columns};
  for (int lane = 0; lane < 32; ++lane) {
    load.registers[lane] = operand_of(operands, lane).registers;
    std::fill_n(load.registers[lane], columns, unread_cell);
  }
  load.values = std::make_shared<std::vector<std::uint32_t>>(static_cast<std::size_t>(32 * columns));
  load.task = scheduler.async().start([&tensor, values = load.values, place, columns] {
    for (unsigned lane = 0; lane < 32; ++lane) {
      const std::uint32_t* from = tensor.cells.data() + (place.lane + lane) * TensorMemory::columns + place.column;
      std::copy_n(from, columns, values->begin() + static_cast<std::ptrdiff_t>(lane) * columns);
    }
  });
  tensor.warps[static_cast<std::size_t>(thread.index / 32)].loads.push_back(std::move(load));
}

void tmem_store(void* const* operands) {
  Scheduler& scheduler = Scheduler::current();
  Thread& thread = scheduler.running();
  TensorMemory& tensor = thread.block->tensor;
  const TensorPlace place = require_lanes(operands, tensor);
  const int columns = operand_of(operands).columns;
  fail_if(tensor.order.store(*thread.warp, place.column, static_cast<unsigned>(columns)));
  std::vector<std::uint32_t> values(static_cast<std::size_t>(32 * columns));
  for (int lane = 0; lane < 32; ++lane)
    std::copy_n(operand_of(operands, lane).registers, columns,
                values.begin() + static_cast<std::ptrdiff_t>(lane) * columns);
  tensor.warps[static_cast<std::size_t>(thread.index / 32)].stores.push_back(
      scheduler.async().start([&tensor, values = std::move(values), place, columns] {
        for (unsigned lane = 0; lane < 32; ++lane) {
          std::copy_n(values.begin() + static_cast<std::ptrdiff_t>(lane) * columns, columns,
                      tensor.cells.data() + (place.lane + lane) * TensorMemory::columns + place.column);
        }
      }));
}

void tmem_wait_load() {
  Scheduler& scheduler = Scheduler::current();
  Block& block = *scheduler.running().block;
  if (!block.tensor.exists()) return;
  const int warp = scheduler.running().index / 32;
  TensorWarp& under_way = block.tensor.warps[static_cast<std::size_t>(warp)];
  for (TensorLoad& load : under_way.loads) {
    load.task->finish();
    for (int lane = 0; lane < 32; ++lane) {
      for (int i = 0; i < load.columns; ++i) {
        if (load.registers[lane][i] != unread_cell)
          scheduler.fail("register " + std::to_string(i) + " was written while it was being loaded");
        load.registers[lane][i] = (*load.values)[static_cast<std::size_t>(lane * load.columns + i)];
      }
    }
  }
  under_way.loads.clear();
  block.tensor.order.finish_loads(warp);
}

void tmem_wait_store() {
  Scheduler& scheduler = Scheduler::current();
  Block& block = *scheduler.running().block;
  if (!block.tensor.exists()) return;
  const int warp = scheduler.running().index / 32;
  TensorWarp& under_way = block.tensor.warps[static_cast<std::size_t>(warp)];
  for (const TaskHandle& store : under_way.stores) store->finish();
  under_way.stores.clear();
  block.tensor.order.finish_stores(warp);
}

void tensor_fence(bool after) {
  Thread& thread = Scheduler::current().running();
  thread.doing = after ? "tcgen05_fence_after" : "tcgen05_fence_before";
  if (after)
    thread.tensor_known = thread.known;
  else
    thread.block->tensor.order.publish(thread);
}

}  // namespace flash_attention::emulator
