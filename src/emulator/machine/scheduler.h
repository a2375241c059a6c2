#pragma once

#include <csetjmp>
#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "emulator/checks/access_counts.h"
#include "emulator/checks/counters.h"
#include "emulator/checks/races.h"
#include "emulator/machine/async.h"
#include "emulator/machine/fiber.h"
#include "emulator/machine/random.h"
#include "emulator/machine/shared_memory.h"
#include "emulator/machine/tensor_memory.h"
#include "emulator/machine/warpgroup.h"
#include "emulator/runtime/interface.h"
#include "emulator/trace/recorder.h"

namespace flash_attention::emulator {

struct Block;
struct Warp;

/// What a blocked thread waits for.
enum class Wait : std::uint8_t {
  nothing,
  warp,
  barrier,
  cluster_barrier,
  mbarrier,
  wgmma,
  registers,
  tensor_memory,
  other_block
};

enum class State : std::uint8_t { ready, waiting, done };

/// One CUDA thread.
struct Thread {
  ThreadView view{};
  Block* block = nullptr;
  Warp* warp = nullptr;
  const FiberStack* stack = nullptr;
  void* stack_pointer = nullptr;
  State state = State::ready;
  Wait wait = Wait::nothing;
  std::uint32_t wait_key = 0;  // barrier, address or parity; for the report, and to find the threads to wake
  std::uint32_t wait_detail = 0;
  const char* doing = "";  // the wrapper it is in
  int index = 0;           // in the block
  CopyGroups copies;       // cp.async
  BulkGroups bulk;         // TMA stores, bulk stores and reductions
  WarpgroupThread wgmma;
  AccessLog accesses;
  int registers = 0;  // after setmaxnreg
  bool cluster_arrived = false;
  std::uint32_t cluster_phase = 0;
  std::uint32_t actor = 0;  // its index in Clocks
  Clocks known;
  Clocks tensor_known;  // what it knew at its last tcgen05_fence_after
};

struct Warp {
  std::vector<Thread*> lanes;
  int ready = 0;             // lanes that can go on
  WarpOp op = WarpOp::sync;  // the current common operation of the lanes that have arrived
  int arrived = 0;
  void* operands[32] = {};
  OpenAccesses open_accesses;
};

/// bar.sync and bar.arrive.
struct NamedBarrier {
  int expected = 0;
  int arrived = 0;
  Clocks known;  // of the threads that have arrived
};

/// One thread block.
struct Block {
  Index3 index{};
  int rank = 0;  // in its cluster
  SharedMemory shared;
  ShadowMemory shadow;
  std::vector<Thread> threads;
  std::vector<Warp> warps;
  std::vector<Warpgroup> warpgroups;
  TensorMemory tensor;
  NamedBarrier barriers[16];
  int alive = 0;                                // threads that have not ended
  std::map<std::size_t, int> hidden_mbarriers;  // offset and thread: initialised, but not yet fenced for the async proxy
  int registers_free = 0;                       // in the pool of setmaxnreg
  int registers_at_entry = 0;
  std::unique_ptr<Recorder> recorder;  // null: this block is not recorded
};

struct LaunchShape {
  Index3 grid{1, 1, 1};
  int block = 1;
  int cluster = 1;
  int shared_bytes = 0;
  int blocks_per_sm = 1;             // at least this many; they share the registers of an SM
  int block_height = 1;              // of a two-dimensional block: its threads are counted row by row
  bool programmatic_launch = false;  // begins before the previous launch has ended, which uses the same workspace
  const void* workspace = nullptr;
  std::size_t workspace_bytes = 0;
};

/// A loaded kernel: src/emulator/host/module.h.
struct EntryPoints {
  void (*run)(const void* argument) = nullptr;
  const ThreadView** (*thread_slot)() = nullptr;
};

/// Runs the blocks of one cluster at a time, on one OS thread: one fiber for each CUDA thread, warps in seeded order.
class Scheduler {
 public:
  Scheduler(const EntryPoints& entry, const LaunchShape& shape, const void* argument, std::uint64_t seed);
  ~Scheduler();
  Scheduler(const Scheduler&) = delete;

  /// Runs cluster `index` of the grid to its end. Returns what went wrong; empty if nothing did. If `record` is not null,
  /// the records of its blocks are added to it.
  std::string run_cluster(std::int64_t index, std::vector<BlockRecord>* record = nullptr);

  /// The scheduler of this OS thread, and its running thread.
  static Scheduler& current();
  Thread& running() { return *running_; }

  void suspend(Wait wait, std::uint32_t key, std::uint32_t detail = 0);
  void yield();  // lets others run first; stays ready
  void wake(Thread& thread);
  /// Wakes every thread of the cluster that waits for this.
  template <typename Predicate>
  void wake_where(Predicate predicate) {
    for (Block& block : blocks_) {
      for (Thread& thread : block.threads) {
        if (thread.state == State::waiting && predicate(thread)) wake(thread);
      }
    }
  }

  /// Records the mistake and ends the cluster; the calling thread never goes on.
  [[noreturn]] void fail(const std::string& message);
  /// The same for an asynchronous task, which has no thread.
  void fail_async(const Block& block, const char* doing, const std::string& message);
  bool failed() const { return !failure_.empty(); }

  std::vector<Block>& blocks() { return blocks_; }
  AsyncEngine& async() { return async_; }
  Random& random() { return random_; }
  Races& races() { return races_; }
  Counters& counters() {
    counters_.fma_flops = arithmetic_.fma_flops;
    return counters_;
  }
  const LaunchShape& shape() const { return shape_; }
  std::uint64_t seed() const { return seed_; }
  int cluster_arrived = 0;  // threads at the cluster's barrier
  std::uint32_t cluster_phase = 0;
  Clocks cluster_known, cluster_passed;  // of threads that have arrived; the same for the phase before

  /// Called by the signal handler. Returns the top of the stack to leave to, or null if the fault is not a kernel's.
  static void* note_fault(const void* address);
  /// A thread goes on here after a fault.
  [[noreturn]] static void fail_fault();

 private:
  static void thread_main();
  void prepare(std::int64_t index, bool recorded);
  void run_warp(Warp& warp);
  Warp* pick_warp();
  Thread* next_lane();
  void enter(Thread& thread, void** left_stack_pointer);
  void leave(Thread& thread);  // switches to the next lane of the warp; the last lane returns to the loop
  void note_idle();
  std::string finish();
  std::string deadlock_report() const;
  std::string describe_fault() const;

  const EntryPoints entry_;
  const LaunchShape shape_;
  const void* const argument_;
  const std::uint64_t seed_;
  Random random_;
  AsyncEngine async_;
  Races races_;
  Counters counters_;
  Arithmetic arithmetic_{};  // of blocks that are not recorded, and the sum of those that were
  std::vector<Block> blocks_;
  std::vector<FiberStack> stacks_;
  const ThreadView** slot_ = nullptr;
  void* main_stack_pointer_ = nullptr;
  StackIdentity main_stack_;
  Thread* running_ = nullptr;
  Warp* turn_ = nullptr;  // the warp whose lanes run, one after another
  std::size_t next_lane_ = 0, lanes_left_ = 0;
  int alive_ = 0;
  Warp* starved_ = nullptr;
  std::uint32_t starvation_ = 0;  // steps until another one is starved
  bool progressed_ = false;
  std::int64_t idle_since_ms_ = 0;
  std::string failure_;
  const void* fault_address_ = nullptr;
  jmp_buf in_task_;  // back into the loop, from a fault of an asynchronous task
};

/// "(1, 0, 2)".
std::string to_string(const Index3& index);

}  // namespace flash_attention::emulator
