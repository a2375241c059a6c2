#include "emulator/instructions/memory_ops.h"

#include <cstring>
#include <functional>
#include <string>
#include <vector>

#include "emulator/checks/counting.h"
#include "emulator/instructions/mbarrier.h"
#include "emulator/machine/address.h"

namespace flash_attention::emulator {
namespace {

const char* name_of(Access access) {
  switch (access) {
    case Access::load_global:
      return "load_global";
    case Access::store_global:
      return "store_global";
    case Access::reduce_global:
      return "reduce_add";
    case Access::load_shared:
      return "load_shared";
    case Access::store_shared:
      return "store_shared";
  }
  return "?";
}

/// Lanes of a warp need not stay together between two meetings: now and then one falls behind.
void maybe_yield(Scheduler& scheduler) {
  if (scheduler.random().below(64) == 0) scheduler.yield();
}

}  // namespace

void require_launch_before(const void* address, bool writes) {
  Scheduler& scheduler = Scheduler::current();
  const LaunchShape& shape = scheduler.shape();
  if (!shape.programmatic_launch || scheduler.races().has_awaited_launch(scheduler.running())) return;
  const std::less<const void*> before;
  const void* end = static_cast<const char*>(shape.workspace) + shape.workspace_bytes;
  if (writes || (!before(address, shape.workspace) && before(address, end)))
    scheduler.fail("the launch before may still run: griddepcontrol_wait is missing");
}

void griddepcontrol_wait() {
  Scheduler& scheduler = Scheduler::current();
  scheduler.races().await_launch(scheduler.running());
}

void access_global(Access access, const void* address, int bytes) {
  Scheduler& scheduler = Scheduler::current();
  scheduler.running().doing = name_of(access);
  const auto value = reinterpret_cast<std::uintptr_t>(address);
  if (value % static_cast<std::uintptr_t>(bytes) != 0) {
    scheduler.fail("the address is not a multiple of the " + std::to_string(bytes) + " bytes accessed");
  }
  if (counting_accesses()) count_access(__builtin_return_address(0), value, bytes, true);
  require_launch_before(address, access != Access::load_global);
  if (Recorder* recorder = scheduler.running().block->recorder.get()) {
    Work& work = recorder->work(scheduler.running());
    (access == Access::load_global ? work.load_bytes : work.store_bytes) += static_cast<std::uint64_t>(bytes);
  }
  Races& races = scheduler.races();
  if (access == Access::load_global) races.read_global(scheduler.running(), address, bytes);
  if (access == Access::store_global) races.write_global(scheduler.running(), address, bytes);
  maybe_yield(scheduler);
}

unsigned char* access_shared(Access access, unsigned address, int bytes, const void* value) {
  Scheduler& scheduler = Scheduler::current();
  scheduler.running().doing = name_of(access);
  const SharedPlace place = locate(address, static_cast<std::size_t>(bytes), static_cast<std::size_t>(bytes));
  if (counting_accesses()) count_access(__builtin_return_address(0), address, bytes, false);
  if (Recorder* recorder = scheduler.running().block->recorder.get())
    recorder->work(scheduler.running()).shared_bytes += static_cast<std::uint64_t>(bytes);
  maybe_yield(scheduler);
  const auto size = static_cast<std::size_t>(bytes);
  if (access == Access::load_shared)
    scheduler.races().read(scheduler.running(), place, size);
  else if (value == nullptr || std::memcmp(place.generic(), value, size) != 0)
    scheduler.races().write(scheduler.running(), place, size);
  else
    scheduler.races().rewrite(scheduler.running(), place, size);
  if (value != nullptr) std::memcpy(place.generic(), value, size);
  return place.generic();
}

void spin() {
  Scheduler& scheduler = Scheduler::current();
  Thread& thread = scheduler.running();
  thread.doing = "load_acquire";
  thread.wait = Wait::other_block;  // for the report; it stays ready
  scheduler.yield();
  thread.wait = Wait::nothing;
}

void copy_async(unsigned shared, const void* global, int bytes, int valid) {
  Scheduler& scheduler = Scheduler::current();
  Thread& thread = scheduler.running();
  thread.doing = "copy_async";
  if (valid < 0 || valid > bytes) scheduler.fail(std::to_string(valid) + " valid bytes of " + std::to_string(bytes));
  if (reinterpret_cast<std::uintptr_t>(global) % static_cast<std::uintptr_t>(bytes) != 0) {
    scheduler.fail("the global address is not a multiple of " + std::to_string(bytes));
  }
  const SharedPlace place = locate(shared, static_cast<std::size_t>(bytes), static_cast<std::size_t>(bytes));
  if (counting_accesses() && valid > 0) {
    count_access(__builtin_return_address(0), reinterpret_cast<std::uintptr_t>(global), valid, true);
  }
  const std::uint32_t number = scheduler.races().start_copy(thread, place, static_cast<std::size_t>(bytes));
  const TaskHandle task = scheduler.async().start([place, global, bytes, valid] {
    std::memcpy(place.generic(), global, static_cast<std::size_t>(valid));
    std::memset(place.generic() + valid, 0, static_cast<std::size_t>(bytes - valid));
  });
  thread.copies.open.push_back({task, number});
  if (thread.block->recorder) thread.block->recorder->work(thread).copy_bytes += static_cast<std::uint64_t>(valid);
}

void store_async(unsigned address, const void* value, int bytes, unsigned barrier) {
  Scheduler& scheduler = Scheduler::current();
  Thread& thread = scheduler.running();
  thread.doing = "cluster_store_async";
  const auto size = static_cast<std::size_t>(bytes);
  const SharedPlace place = locate(address, size, size), counter = locate(barrier, 8, 8);
  if (place.block != counter.block) scheduler.fail("the mbarrier is not in the block that is stored to");
  require_visible_mbarrier(counter);
  Races& races = scheduler.races();
  races.read(thread, counter, 8);  // it has been initialised
  races.bulk_load_writes(thread, races.mbarrier(*counter.block, counter.offset), place, size);
  if (thread.block->recorder) {
    const auto offset = static_cast<std::uint32_t>(counter.offset);
    thread.block->recorder->add(thread, {.kind = EventKind::store_async,
                                         .place = {counter.block->rank, offset},
                                         .number = counter.block->recorder->phase(offset),
                                         .amount = static_cast<std::uint32_t>(bytes),
                                         .targets = 1u << counter.block->rank,
                                         .barrier = offset});
  }
  const auto* from = static_cast<const unsigned char*>(value);
  scheduler.async().start_signalling([place, counter, size, stored = std::vector(from, from + size)] {
    if (place.block->alive == 0)
      return Scheduler::current().fail_async(*place.block, "cluster_store_async", "the block that is stored to has ended");
    std::memcpy(place.generic(), stored.data(), size);
    mbarrier_complete(counter, static_cast<int>(size), "cluster_store_async");
  });
}

void copy_async_commit() {
  Thread& thread = Scheduler::current().running();
  thread.copies.commit();
  if (thread.block->recorder) thread.block->recorder->add(thread, {.kind = EventKind::copy_commit}, true);
}

void copy_async_wait(int pending) {
  Scheduler& scheduler = Scheduler::current();
  Thread& thread = scheduler.running();
  if (thread.block->recorder) {
    thread.block->recorder->add(thread, {.kind = EventKind::copy_wait, .amount = static_cast<std::uint32_t>(pending)},
                                true);
  }
  CopyGroups& copies = thread.copies;
  while (static_cast<int>(copies.committed.size()) > pending) {
    for (const Copy& copy : copies.committed.front()) {
      copy.task->finish();
      scheduler.races().finish(scheduler.running(), copy.number);
    }
    copies.committed.pop_front();
  }
}

void copy_async_arrive(unsigned mbarrier) {
  Scheduler& scheduler = Scheduler::current();
  Thread& thread = scheduler.running();
  thread.doing = "copy_async_arrive";
  const SharedPlace place = locate(mbarrier, 8, 8);
  Races& races = scheduler.races();
  races.read(thread, place, 8);  // it has been initialised
  thread.copies.commit();
  std::vector<Copy> copies;
  for (const auto& group : thread.copies.committed) copies.insert(copies.end(), group.begin(), group.end());
  thread.copies.clear();
  const std::uint32_t moment = thread.known[thread.actor];
  Clocks known;
  races.release(thread, known);
  scheduler.async().start_signalling([place, copies, moment, known] {
    for (const Copy& copy : copies) {
      copy.task->finish();
      Scheduler::current().races().finish(moment, copy.number);
    }
    mbarrier_arrive_later(place, known, "copy_async_arrive");
  });
}

}  // namespace flash_attention::emulator
