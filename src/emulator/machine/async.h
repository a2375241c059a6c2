#pragma once

#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <vector>

#include "emulator/machine/random.h"

namespace flash_attention::emulator {

/// Something that an instruction started and that takes effect later.
struct Task {
  std::function<void()> effect;
  bool done = false;

  void finish() {
    if (done) return;
    done = true;
    effect();
    effect = nullptr;
  }
};
using TaskHandle = std::shared_ptr<Task>;

/// Decides when asynchronous instructions take effect: at once, some time later, or at the last moment allowed. The seed
/// makes the choice, so that a program that relies on more than it may is wrong under some seed.
class AsyncEngine {
 public:
  explicit AsyncEngine(Random& random) : random_(random) {}

  void reset();
  /// For effects that the program waits for by name (wait_group): the holder of the handle finishes it at the latest.
  TaskHandle start(std::function<void()> effect);
  /// For effects that signal an mbarrier: happens by itself at the latest when no thread can go on.
  void start_signalling(std::function<void()> effect);

  void advance();  ///< one step of time: what is due happens
  bool run_one();  ///< no thread can go on: one signalling effect happens. False if there is none

 private:
  struct Due {
    std::uint64_t time;
    TaskHandle task;
    bool operator<(const Due& other) const { return time > other.time; }
  };
  enum class Moment { at_once, later, last };
  Moment choose();
  void schedule(const TaskHandle& task);

  Random& random_;
  std::uint64_t now_ = 0;
  std::vector<Due> due_;  // a heap
  std::vector<TaskHandle> signalling_;
};

/// A thread's groups of asynchronous instructions: commit closes one, waits name how many may still be open.
template <typename Item>
struct Groups {
  std::vector<Item> open;
  std::deque<std::vector<Item>> committed;

  void commit() {
    committed.push_back(std::move(open));
    open.clear();
  }
  void clear() {
    open.clear();
    committed.clear();
  }
};

/// cp.async. `number` is the one that Races knows it by.
struct Copy {
  TaskHandle task;
  std::uint32_t number;
};
using CopyGroups = Groups<Copy>;

/// A bulk store reads shared memory, and later writes global memory.
struct BulkStore {
  std::uint32_t number;
  TaskHandle read;
  TaskHandle write;
};
using BulkGroups = Groups<BulkStore>;

}  // namespace flash_attention::emulator
