#include <algorithm>
#include <atomic>
#include <cstring>
#include <memory>
#include <string>
#include <vector>

#include "emulator/instructions/mbarrier.h"
#include "emulator/instructions/memory_ops.h"
#include "emulator/instructions/table.h"
#include "emulator/instructions/tensor_map.h"
#include "emulator/machine/address.h"

namespace flash_attention::emulator {
namespace {

/// Calls visit(offset in the box, global bytes or null where outside the tensor, bytes) for each run of a box's inner row.
template <typename Visit>
void for_each_run(const TensorMapFields& map, const int* coordinates, Visit visit) {
  const std::int64_t inner = map.box[0], size = static_cast<std::int64_t>(map.sizes[0]), element = map.element_bytes;
  std::int64_t rows = 1;
  for (int i = 1; i < map.rank; ++i) rows *= map.box[i];
  for (std::int64_t row = 0; row < rows; ++row) {
    bool inside = true;
    unsigned char* line = map.data;
    std::int64_t rest = row;
    for (int i = 1; i < map.rank; ++i) {
      const std::int64_t at = coordinates[i] + rest % map.box[i];
      rest /= map.box[i];
      inside = inside && at >= 0 && at < static_cast<std::int64_t>(map.sizes[i]);
      line += at * static_cast<std::int64_t>(map.strides[i - 1]);
    }
    const std::int64_t x = coordinates[0];
    const std::int64_t begin = inside ? std::clamp<std::int64_t>(-x, 0, inner) : inner;
    const std::int64_t end = inside ? std::clamp<std::int64_t>(size - x, begin, inner) : inner;
    const std::int64_t base = row * inner * element;
    if (begin > 0) visit(base, nullptr, begin * element);
    if (end > begin) visit(base + begin * element, line + (x + begin) * element, (end - begin) * element);
    if (inner > end) visit(base + end * element, nullptr, (inner - end) * element);
  }
}

struct Transfer {
  BulkOperand operand;
  TensorMapFields map;
  SharedPlace shared;
  std::size_t bytes;
  int swizzle_bytes;
};

/// Checks everything on which the hardware would trap.
Transfer prepare(const BulkOperand& operand, const char* doing) {
  Scheduler& scheduler = Scheduler::current();
  scheduler.running().doing = doing;
  Transfer transfer{operand, {}, {}, static_cast<std::size_t>(operand.bytes), 0};
  if (operand.map != nullptr) {
    if (reinterpret_cast<std::uintptr_t>(operand.map) % 64 != 0) scheduler.fail("the tensor map is not 64-byte aligned");
    if (!decode(operand.map, transfer.map)) scheduler.fail("this slot holds no tensor map");
    if (transfer.map.rank != operand.rank) {
      scheduler.fail("the tensor map has rank " + std::to_string(transfer.map.rank) + ", not " +
                     std::to_string(operand.rank));
    }
    transfer.bytes = transfer.map.box_bytes();
    transfer.swizzle_bytes = transfer.map.swizzle_bytes;
  } else {
    if (operand.bytes <= 0 || operand.bytes % 16 != 0) {
      scheduler.fail(std::to_string(operand.bytes) + " bytes; allowed are positive multiples of 16");
    }
    if (reinterpret_cast<std::uintptr_t>(operand.global) % 16 != 0)
      scheduler.fail("the global address is not a multiple of 16");
  }
  transfer.shared = locate(operand.shared, transfer.bytes, operand.map != nullptr ? 128 : 16);
  scheduler.counters().bulk_bytes += transfer.bytes;
  return transfer;
}

void read_global(const Transfer& transfer, unsigned char* box) {
  if (transfer.operand.map == nullptr) {
    std::memcpy(box, transfer.operand.global, transfer.bytes);
    return;
  }
  for_each_run(transfer.map, transfer.operand.coordinates,
               [&](std::int64_t offset, const unsigned char* line, std::int64_t bytes) {
                 if (line == nullptr)
                   std::memset(box + offset, 0, static_cast<std::size_t>(bytes));
                 else
                   std::memcpy(box + offset, line, static_cast<std::size_t>(bytes));
               });
}

/// Adds one element at a time, atomically, as the hardware does. Blocks run on several OS threads.
void add_floats(unsigned char* global, const unsigned char* values, std::int64_t bytes) {
  for (std::int64_t i = 0; i < bytes; i += 4) {
    float value;
    std::memcpy(&value, values + i, 4);
    std::atomic_ref<float>(*reinterpret_cast<float*>(global + i)).fetch_add(value, std::memory_order_relaxed);
  }
}

/// A copy does not wait for stores of the other proxy. A store that no fence has published may happen after it.
void require_no_open_stores(const SharedMemory& shared, const Transfer& transfer) {
  const std::ptrdiff_t at = shared.unfenced(transfer.shared.offset, transfer.bytes);
  if (at < 0) return;
  Scheduler::current().fail("race: writes shared offset " + std::to_string(at) +
                            ", which a thread stored to; fence_async_shared is missing between the two");
}

void write_global(const Transfer& transfer, const unsigned char* box) {
  const auto write = [&](unsigned char* line, const unsigned char* from, std::int64_t bytes) {
    if (transfer.operand.add)
      add_floats(line, from, bytes);
    else
      std::memcpy(line, from, static_cast<std::size_t>(bytes));
  };
  if (transfer.operand.map == nullptr) {
    return write(static_cast<unsigned char*>(const_cast<void*>(transfer.operand.global)), box,
                 static_cast<std::int64_t>(transfer.bytes));
  }
  for_each_run(transfer.map, transfer.operand.coordinates,
               [&](std::int64_t offset, unsigned char* line, std::int64_t bytes) {
                 if (line != nullptr) write(line, box + offset, bytes);
               });
}

/// The box in shared memory, 16 bytes at a time, each at its swizzled place.
template <typename Move>
void for_each_chunk(const Transfer& transfer, Move move) {
  const std::size_t base = transfer.shared.offset + shared_window;
  for (std::size_t at = 0; at < transfer.bytes; at += 16) {
    move(at, swizzle(base + at, transfer.swizzle_bytes) - base + transfer.shared.offset);
  }
}

}  // namespace

void bulk_load(const BulkOperand& operand) {
  const Transfer transfer = prepare(operand, operand.map != nullptr ? "tma_load" : "bulk_load");
  if (operand.map == nullptr) require_launch_before(operand.global, false);
  const SharedPlace barrier = locate(operand.barrier, 8, 8);
  require_visible_mbarrier(barrier);
  Scheduler& scheduler = Scheduler::current();
  const unsigned multicast = operand.multicast != 0 ? operand.multicast : 1u << transfer.shared.block->rank;
  if (multicast >> scheduler.blocks().size() != 0)
    scheduler.fail("the multicast mask names a block that is not in the cluster");
  for (Block& block : scheduler.blocks()) {
    if ((multicast >> block.rank & 1) == 0) continue;
    const MbarrierOrder& order = scheduler.races().mbarrier(block, barrier.offset);
    scheduler.races().read(scheduler.running(), {&block, barrier.offset}, 8);  // the mbarrier has been initialised
    scheduler.races().bulk_load_writes(scheduler.running(), order, {&block, transfer.shared.offset}, transfer.bytes);
    require_no_open_stores(block.shared, transfer);
  }
  if (Recorder* recorder = scheduler.running().block->recorder.get()) {
    const auto offset = static_cast<std::uint32_t>(barrier.offset);
    recorder->add(scheduler.running(), {.kind = EventKind::bulk_load,
                                        .place = {barrier.block->rank, static_cast<std::uint32_t>(transfer.shared.offset)},
                                        .number = barrier.block->recorder->phase(offset),
                                        .amount = static_cast<std::uint32_t>(transfer.bytes),
                                        .targets = multicast,
                                        .barrier = offset});
  }
  scheduler.async().start_signalling([transfer, barrier, multicast, &scheduler] {
    std::vector<unsigned char> box(transfer.bytes);
    read_global(transfer, box.data());
    for (Block& block : scheduler.blocks()) {
      if ((multicast >> block.rank & 1) == 0) continue;
      if (block.alive == 0) return scheduler.fail_async(block, "tma_load", "a box arrives at a block that has ended");
      for_each_chunk(transfer,
                     [&](std::size_t from, std::size_t to) { block.shared.write_both(to, box.data() + from, 16); });
      mbarrier_complete({&block, barrier.offset}, static_cast<int>(transfer.bytes), "tma_load");
    }
  });
}

void bulk_store(const BulkOperand& operand) {
  const Transfer transfer = prepare(operand, operand.map != nullptr ? "tma_store"
                                             : operand.add          ? "bulk_reduce_add"
                                                                    : "bulk_store");
  require_launch_before(operand.global, true);
  Scheduler& scheduler = Scheduler::current();
  const auto box = std::make_shared<std::vector<unsigned char>>(transfer.bytes);
  BulkStore store;
  store.number = scheduler.races().start_bulk_store(scheduler.running(), transfer.shared, transfer.bytes);
  store.read = scheduler.async().start([transfer, box] {
    for_each_chunk(transfer, [&](std::size_t to, std::size_t from) {
      std::memcpy(box->data() + to, transfer.shared.block->shared.async() + from, 16);
    });
  });
  store.write = scheduler.async().start([transfer, box, read = store.read] {
    read->finish();
    write_global(transfer, box->data());
  });
  Thread& thread = scheduler.running();
  thread.bulk.open.push_back(std::move(store));
  if (thread.block->recorder) {
    const auto bytes = static_cast<std::uint32_t>(transfer.bytes);
    thread.block->recorder->add(thread, {.kind = EventKind::bulk_store, .amount = bytes}, true);
  }
}

void bulk_commit() {
  Thread& thread = Scheduler::current().running();
  thread.bulk.commit();
  if (thread.block->recorder) thread.block->recorder->add(thread, {.kind = EventKind::bulk_commit}, true);
}

void bulk_wait(int pending, bool read) {
  Scheduler& scheduler = Scheduler::current();
  Thread& thread = scheduler.running();
  if (thread.block->recorder) {
    thread.block->recorder->add(
        thread,
        {.kind = read ? EventKind::bulk_wait_read : EventKind::bulk_wait, .amount = static_cast<std::uint32_t>(pending)},
        true);
  }
  BulkGroups& groups = thread.bulk;
  const std::size_t finished =
      groups.committed.size() - std::min(groups.committed.size(), static_cast<std::size_t>(pending));
  for (std::size_t i = 0; i < finished; ++i) {
    for (const BulkStore& store : groups.committed[i]) {
      store.read->finish();
      scheduler.races().finish(scheduler.running(), store.number);
      if (!read) store.write->finish();
    }
  }
  if (!read)
    groups.committed.erase(groups.committed.begin(), groups.committed.begin() + static_cast<std::ptrdiff_t>(finished));
}

/// The whole memory is copied, so one copy serves all lanes that are at a fence: the other lanes get there first.
void fence_proxy_async() {
  Scheduler& scheduler = Scheduler::current();
  SharedMemory& shared = scheduler.running().block->shared;
  const std::uint64_t before = shared.published();
  scheduler.yield();
  if (shared.published() == before) shared.publish();
}

}  // namespace flash_attention::emulator
