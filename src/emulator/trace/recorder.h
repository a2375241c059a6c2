#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <vector>

#include "emulator/runtime/interface.h"
#include "emulator/trace/record.h"

namespace flash_attention::emulator {

struct Thread;

/// Writes down one block while it runs. Instructions tell it what each thread does; it puts the lanes of a warp together
/// again, so that a record has one list of events for each warp. An event of a single lane (an elected one that starts a
/// copy) stands where that lane met it.
class Recorder {
 public:
  Recorder(int rank, int warps);

  void barrier(const Thread& thread, int id, bool wait);
  void barrier_completed(int id) { ++generations_[id]; }
  void cluster_barrier(const Thread& thread, std::uint32_t generation, bool wait);
  void mbarrier_wait(const Thread& thread, std::uint32_t offset);
  void phase_completed(std::uint32_t offset) { ++phases_[offset]; }
  /// The number of the phase that this mbarrier is in now.
  std::int64_t phase(std::uint32_t offset) const;
  /// Everything else. Numbers of groups and waits are counted here if `counted`.
  void add(const Thread& thread, Event event, bool counted = false);

  /// Where a thread's arithmetic is counted.
  Arithmetic* arithmetic(int index) { return &lanes_[static_cast<std::size_t>(index)].arithmetic; }
  Work& work(const Thread& thread);
  /// All lanes of a warp have met: what comes next comes after what any of them did.
  void meet(const Thread& thread);

  BlockRecord finish(Arithmetic& total);

 private:
  struct Lane {
    std::size_t next = 0;  // events of the warp that it is past
    Arithmetic arithmetic{};
    Work work;
    std::map<EventKind, std::int64_t> counts;
  };

  Work take_work(Lane& lane);

  const int rank_;
  std::vector<WarpRecord> warps_;
  std::vector<Lane> lanes_;
  std::map<std::uint32_t, std::int64_t> phases_;  // that completed, by offset
  std::map<int, std::int64_t> generations_;       // of named barriers
  Arithmetic total_{};
};

/// Which launches are recorded now; empty: none.
std::optional<RecordRequest> recording();
void keep_record(LaunchRecord record);

}  // namespace flash_attention::emulator
