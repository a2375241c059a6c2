#pragma once

#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <vector>

#include "emulator/machine/random.h"

namespace flash_attention::emulator {

/// An effect that an instruction starts and that happens later.
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

/// Decides when asynchronous instructions take effect: at once, some time later, or at the last allowed moment. The
/// seed chooses, so a program that relies on more than it may is wrong under some seed.
class AsyncEngine {
 public:
  explicit AsyncEngine(Random& random) : random_(random) {}

  void reset();
  /// For effects that the program waits for by name (wait_group). The holder of the handle finishes the effect at the
  /// latest.
  TaskHandle start(std::function<void()> effect);
  /// For effects that signal an mbarrier. They happen by themselves at the latest when no thread can go on.
  void start_signalling(std::function<void()> effect);

  void advance();  ///< one step of time: effects that are due happen
  bool run_one();  ///< called if no thread can go on: one signalling effect happens. False if there is none

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

/// A thread's groups of asynchronous instructions. commit closes a group; a wait says how many may still be open.
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

/// cp.async. `number` identifies it in Races.
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
