#include <string>
#include <utility>

#include "emulator/instructions/table.h"
#include "emulator/machine/scheduler.h"

namespace flash_attention::emulator {

void barrier(int id, int threads, bool wait) {
  Scheduler& scheduler = Scheduler::current();
  Thread& thread = scheduler.running();
  Block& block = *thread.block;
  thread.doing = threads == 0 ? "__syncthreads" : wait ? "barrier_sync" : "barrier_arrive";
  thread.accesses.next_epoch();
  const int size = scheduler.shape().block;
  if (threads == 0)
    threads = size;
  else if (threads % 32 != 0 || threads > (size + 31) / 32 * 32) {
    scheduler.fail("waits for " + std::to_string(threads) + " threads; allowed are multiples of 32 up to " +
                   std::to_string(size));
  }
  if (id < 0 || id > 15) scheduler.fail("barrier " + std::to_string(id) + " does not exist; there are 0 to 15");
  NamedBarrier& barrier = block.barriers[id];
  if (barrier.arrived == 0) {
    barrier.expected = threads;
  } else if (barrier.expected != threads) {
    scheduler.fail("barrier " + std::to_string(id) + " is for " + std::to_string(threads) + " threads here and for " +
                   std::to_string(barrier.expected) + " elsewhere");
  }
  if (wait && thread.view.lane == 0) ++scheduler.counters().barrier_waits;
  scheduler.races().release(thread, barrier.known);
  if (block.recorder) block.recorder->barrier(thread, id, wait);
  if (++barrier.arrived < barrier.expected) {
    if (wait) scheduler.suspend(Wait::barrier, static_cast<std::uint32_t>(id));
    return;
  }
  barrier.arrived = 0;
  if (block.recorder) block.recorder->barrier_completed(id);
  if (wait) scheduler.races().acquire(thread, barrier.known);
  for (Thread& other : block.threads) {
    if (other.state == State::waiting && other.wait == Wait::barrier && other.wait_key == static_cast<std::uint32_t>(id)) {
      scheduler.races().acquire(other, barrier.known);
      scheduler.wake(other);
    }
  }
  barrier.known.clear();
}

void cluster_barrier(bool wait) {
  Scheduler& scheduler = Scheduler::current();
  Thread& thread = scheduler.running();
  thread.doing = wait ? "cluster_wait" : "cluster_arrive";
  thread.accesses.next_epoch();
  if (wait) {
    if (!thread.cluster_arrived) scheduler.fail("cluster_arrive has not been called");
    thread.cluster_arrived = false;
    if (thread.cluster_phase == scheduler.cluster_phase) scheduler.suspend(Wait::cluster_barrier, thread.cluster_phase);
    scheduler.races().acquire(thread, scheduler.cluster_passed);
    if (thread.block->recorder) thread.block->recorder->cluster_barrier(thread, thread.cluster_phase, true);
    return;
  }
  if (thread.cluster_arrived) scheduler.fail("has come twice without cluster_wait");
  thread.cluster_arrived = true;
  thread.cluster_phase = scheduler.cluster_phase;
  scheduler.races().release(thread, scheduler.cluster_known);
  if (thread.block->recorder) thread.block->recorder->cluster_barrier(thread, thread.cluster_phase, false);
  if (++scheduler.cluster_arrived < scheduler.shape().block * scheduler.shape().cluster) return;
  scheduler.cluster_arrived = 0;
  scheduler.cluster_passed = std::exchange(scheduler.cluster_known, {});
  const std::uint32_t phase = scheduler.cluster_phase++;
  scheduler.wake_where([&](const Thread& other) { return other.wait == Wait::cluster_barrier && other.wait_key == phase; });
}

void set_registers(int count, bool increase) {
  Scheduler& scheduler = Scheduler::current();
  Thread& thread = scheduler.running();
  Block& block = *thread.block;
  thread.doing = increase ? "registers_increase" : "registers_decrease";
  const int held = thread.registers != 0 ? thread.registers : block.registers_at_entry;
  if (increase ? count < held : count > held) {
    scheduler.fail(std::to_string(count) + " registers are asked for by a thread that has " + std::to_string(held));
  }
  while (increase && block.registers_free < count - held) {
    scheduler.suspend(Wait::registers, static_cast<std::uint32_t>(count));
  }
  block.registers_free -= count - held;
  thread.registers = count;
  for (Thread& other : block.threads) {
    if (other.state == State::waiting && other.wait == Wait::registers) scheduler.wake(other);
  }
}

}  // namespace flash_attention::emulator
