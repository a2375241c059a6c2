#include "emulator/machine/scheduler.h"

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <iterator>
#include <thread>

#include "emulator/checks/deadlock.h"
#include "emulator/machine/switch_stack.h"

namespace flash_attention::emulator {
namespace {

thread_local Scheduler* current_scheduler = nullptr;

constexpr int registers_of_an_sm = 65536;
constexpr std::uint32_t longest_starvation = 2048;  // in steps of warps
constexpr std::int64_t patience_ms = 20000;         // for another block, if threads wait for it

std::int64_t now_ms() {
  return std::chrono::duration_cast<std::chrono::milliseconds>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

}  // namespace

std::string to_string(const Index3& index) {
  return "(" + std::to_string(index.x) + ", " + std::to_string(index.y) + ", " + std::to_string(index.z) + ")";
}

Scheduler& Scheduler::current() { return *current_scheduler; }

Scheduler::Scheduler(const EntryPoints& entry, const LaunchShape& shape, const void* argument, std::uint64_t seed)
    : entry_(entry), shape_(shape), argument_(argument), seed_(seed), random_(seed), async_(random_) {
  blocks_.resize(static_cast<std::size_t>(shape.cluster));
  stacks_ = take_stacks(static_cast<std::size_t>(shape.cluster * shape.block));
}

Scheduler::~Scheduler() { leave_stacks(std::move(stacks_)); }

void Scheduler::prepare(std::int64_t index, bool recorded) {
  random_ = Random(seed_ * 1000003 + static_cast<std::uint64_t>(index));
  async_.reset();
  failure_.clear();
  starvation_ = 0;
  cluster_arrived = 0;
  cluster_phase = 0;
  alive_ = shape_.block * shape_.cluster;
  const auto height = static_cast<unsigned>(shape_.block_height);
  const Index3 block_dim{static_cast<unsigned>(shape_.block) / height, height, 1};
  for (int rank = 0; rank < shape_.cluster; ++rank) {
    Block& block = blocks_[static_cast<std::size_t>(rank)];
    const std::int64_t linear = index * shape_.cluster + rank;
    block.index = {static_cast<unsigned>(linear % shape_.grid.x),
                   static_cast<unsigned>(linear / shape_.grid.x % shape_.grid.y),
                   static_cast<unsigned>(linear / shape_.grid.x / shape_.grid.y)};
    block.rank = rank;
    block.shared.reset(static_cast<std::size_t>(shape_.shared_bytes));
    for (NamedBarrier& barrier : block.barriers) barrier = {};
    const int threads = (shape_.block + 31) / 32 * 32;
    block.registers_at_entry = std::min(255, registers_of_an_sm / shape_.blocks_per_sm / threads / 8 * 8);
    block.alive = shape_.block;
    block.registers_free = 0;
    block.hidden_mbarriers.clear();
    block.recorder = recorded ? std::make_unique<Recorder>(rank, (shape_.block + 31) / 32) : nullptr;
    block.tensor = {};
    block.threads = std::vector<Thread>(static_cast<std::size_t>(shape_.block));
    block.warps.assign(static_cast<std::size_t>((shape_.block + 31) / 32), Warp{});
    block.warpgroups.clear();
    block.warpgroups.resize(static_cast<std::size_t>((shape_.block + 127) / 128));
    for (Warpgroup& warpgroup : block.warpgroups) warpgroup.block = &block;
    for (int i = 0; i < shape_.block; ++i) {
      Thread& thread = block.threads[static_cast<std::size_t>(i)];
      thread.view = {{static_cast<unsigned>(i) % block_dim.x, static_cast<unsigned>(i) / block_dim.x, 0},
                     block.index,
                     block_dim,
                     shape_.grid,
                     static_cast<unsigned>(i % 32),
                     static_cast<unsigned>(rank),
                     static_cast<unsigned>(shape_.cluster),
                     block.shared.generic(),
                     static_cast<unsigned>(shape_.shared_bytes),
                     recorded ? block.recorder->arithmetic(i) : &arithmetic_};
      thread.block = &block;
      thread.warp = &block.warps[static_cast<std::size_t>(i / 32)];
      thread.warp->lanes.push_back(&thread);
      ++thread.warp->ready;
      thread.index = i;
      thread.stack = &stacks_[static_cast<std::size_t>(rank * shape_.block + i)];
      thread.stack_pointer = thread.stack->prepare(thread_main, i);
    }
  }
  cluster_known.clear();
  races_.reset(blocks_);
}

void Scheduler::thread_main() {
  Scheduler& self = current();
  StackIdentity of_a_lane;
  enter_fiber(self.main_stack_.size == 0 ? self.main_stack_ : of_a_lane);
  self.entry_.run(self.argument_);
  Thread& thread = self.running();
  thread.state = State::done;
  --thread.warp->ready;
  --thread.block->alive;
  --self.alive_;
  self.progressed_ = true;
  self.leave(thread);
  __builtin_unreachable();
}

[[gnu::always_inline]] inline void Scheduler::enter(Thread& thread, void** left_stack_pointer) {
  running_ = &thread;
  *slot_ = &thread.view;
  switch_stack(left_stack_pointer, thread.stack_pointer, thread.stack->identity());
}

void Scheduler::suspend(Wait wait, std::uint32_t key, std::uint32_t detail) {
  Thread& thread = *running_;
  thread.state = State::waiting;
  thread.wait = wait;
  thread.wait_key = key;
  thread.wait_detail = detail;
  --thread.warp->ready;
  progressed_ = true;
  leave(thread);
}

void Scheduler::yield() { leave(*running_); }

void Scheduler::leave(Thread& thread) {
  if (Thread* next = next_lane()) return enter(*next, &thread.stack_pointer);
  switch_stack(&thread.stack_pointer, main_stack_pointer_, main_stack_);
}

void Scheduler::wake(Thread& thread) {
  thread.state = State::ready;
  thread.wait = Wait::nothing;
  ++thread.warp->ready;
}

void Scheduler::fail(const std::string& message) {
  Thread& thread = *running_;
  if (failure_.empty()) {
    failure_ = "block " + to_string(thread.block->index) + ", thread " + std::to_string(thread.index) + ", " +
               thread.doing + ": " + message;
  }
  leave(thread);
  __builtin_unreachable();
}

void Scheduler::fail_async(const Block& block, const char* doing, const std::string& message) {
  if (failure_.empty()) failure_ = "block " + to_string(block.index) + ", " + doing + ": " + message;
}

/// Any warp that can go on, except a starved one: for a while it runs only if no other warp can. This finds code that
/// relies on no warp falling far behind.
Warp* Scheduler::pick_warp() {
  if (starvation_-- == 0) {
    starvation_ = 1 + random_.below(longest_starvation);
    std::vector<Warp>& warps = blocks_[random_.below(static_cast<std::uint32_t>(blocks_.size()))].warps;
    starved_ = &warps[random_.below(static_cast<std::uint32_t>(warps.size()))];
  }
  Warp* chosen = nullptr;
  std::uint32_t seen = 0;
  for (Block& block : blocks_) {
    for (Warp& warp : block.warps) {
      if (warp.ready > 0 && &warp != starved_ && random_.below(++seen) == 0) chosen = &warp;
    }
  }
  return chosen == nullptr && starved_->ready > 0 ? starved_ : chosen;
}

/// Runs a warp. A lane that waits switches directly to the next lane: half as many switches as through a loop.
void Scheduler::run_warp(Warp& warp) {
  turn_ = &warp;
  lanes_left_ = warp.lanes.size();
  next_lane_ = random_.below(static_cast<std::uint32_t>(lanes_left_));
  if (Thread* first = next_lane()) enter(*first, &main_stack_pointer_);
  running_ = nullptr;
}

/// The next lane of the warp that can run; null if all have run, or if something went wrong.
Thread* Scheduler::next_lane() {
  const std::vector<Thread*>& lanes = turn_->lanes;
  while (lanes_left_ > 0 && failure_.empty()) {
    Thread* thread = lanes[next_lane_];
    next_lane_ = next_lane_ + 1 == lanes.size() ? 0 : next_lane_ + 1;
    --lanes_left_;
    if (thread->state == State::ready) return thread;
  }
  return nullptr;
}

/// Only threads that poll global memory are left: copies in flight land, then another block may run. Gives up if
/// nothing changes.
void Scheduler::note_idle() {
  const std::int64_t now = now_ms();
  if (progressed_ || async_.run_one()) idle_since_ms_ = now;
  progressed_ = false;
  if (now - idle_since_ms_ > patience_ms) failure_ = deadlock_report();
  if (now != idle_since_ms_) std::this_thread::sleep_for(std::chrono::microseconds(50));
}

std::string Scheduler::run_cluster(std::int64_t index, std::vector<BlockRecord>* record) {
  current_scheduler = this;
  slot_ = entry_.thread_slot();
  main_stack_ = current_stack();
  prepare(index, record != nullptr);
  if (setjmp(in_task_) != 0) failure_ = "an asynchronous copy " + describe_fault();
  std::uint32_t steps = 0;
  while (alive_ > 0 && failure_.empty()) {
    async_.advance();
    if (!failure_.empty()) break;
    Warp* warp = pick_warp();
    if (warp == starved_ && random_.below(8) != 0 && async_.run_one()) continue;  // it stays starved while copies land
    if (warp != nullptr) {
      run_warp(*warp);
      if ((++steps & 0xfff) == 0) note_idle();
    } else if (!async_.run_one()) {
      failure_ = deadlock_report();
    }
  }
  std::string wrong = finish();
  if (record != nullptr) {
    for (Block& block : blocks_) {
      record->push_back(block.recorder->finish(arithmetic_));
      record->back().index = {block.index.x, block.index.y, block.index.z};
    }
  }
  return wrong;
}

std::string Scheduler::finish() {
  for (Block& block : blocks_) {
    for (Warp& warp : block.warps) count_open_accesses(warp.open_accesses);
    if (failure_.empty() && block.shared.overrun()) {
      failure_ = "block " + to_string(block.index) + ": wrote past the end of its " + std::to_string(block.shared.size()) +
                 " bytes of shared memory";
    }
    const auto awaited = [&](const Thread& thread) { return races_.has_awaited_launch(thread); };
    if (failure_.empty() && shape_.programmatic_launch && !std::any_of(block.threads.begin(), block.threads.end(), awaited))
      failure_ = "block " + to_string(block.index) + ": ended without griddepcontrol_wait";
    for (std::size_t i = 0; i < std::size(block.barriers) && failure_.empty(); ++i) {
      const NamedBarrier& barrier = block.barriers[i];
      if (barrier.arrived != 0) {
        failure_ = "block " + to_string(block.index) + ": ended with " + std::to_string(barrier.arrived) + " of " +
                   std::to_string(barrier.expected) + " threads at barrier " + std::to_string(i);
      }
    }
    if (const std::string left = what_is_left(block.tensor); failure_.empty() && !left.empty())
      failure_ = "block " + to_string(block.index) + ": ended " + left;
    for (Thread& thread : block.threads) {
      if (!failure_.empty()) break;
      const std::string who = "block " + to_string(block.index) + ", thread " + std::to_string(thread.index) + ": ";
      if (!thread.wgmma.in_flight.empty()) failure_ = who + "ended while its wgmma was in flight (wgmma_wait is missing)";
      thread.copies.commit();
      for (const auto& group : thread.copies.committed) {
        if (!group.empty()) failure_ = who + "ended while its copies were in flight (copy_async_wait is missing)";
      }
      thread.bulk.commit();
      for (auto& group : thread.bulk.committed) {
        for (BulkStore& store : group) {
          if (!store.read->done)
            failure_ = who + "ended before its bulk store had read shared memory (bulk_wait_read is missing)";
          store.read->finish();
          store.write->finish();
        }
      }
    }
  }
  if (failure_.empty() && async_.run_one()) {
    failure_ = "block " + to_string(blocks_.front().index) +
               ": ended while a bulk load or a tcgen05_commit into its shared memory was in flight";
  }
  counters_.blocks += static_cast<std::uint64_t>(shape_.cluster);
  counters_.threads += static_cast<std::uint64_t>(shape_.cluster * shape_.block);
  current_scheduler = nullptr;
  return failure_;
}

void* Scheduler::note_fault(const void* address) {
  Scheduler* self = current_scheduler;
  if (self == nullptr) return nullptr;
  self->fault_address_ = address;
  if (self->running_ == nullptr) longjmp(self->in_task_, 1);
  return self->running_->stack->top();
}

void Scheduler::fail_fault() {
  Scheduler& self = current();
  self.fail(self.describe_fault());
}

std::string Scheduler::describe_fault() const {
  for (const Block& block : blocks_) {
    if (block.shared.guards(fault_address_)) {
      const auto past = static_cast<const unsigned char*>(fault_address_) - block.shared.generic();
      return "touched offset " + std::to_string(past) + " of the block's " + std::to_string(block.shared.size()) +
             " bytes of shared memory";
    }
  }
  for (const FiberStack& stack : stacks_) {
    if (stack.guards(fault_address_)) return "its stack of " + std::to_string(FiberStack::size / 1024) + " KiB is full";
  }
  char text[32];
  std::snprintf(text, sizeof text, "%p", fault_address_);
  return std::string("touched memory at ") + text + ", which is not there";
}

std::string Scheduler::deadlock_report() const { return describe_deadlock(blocks_, shape_); }

}  // namespace flash_attention::emulator
