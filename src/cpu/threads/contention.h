#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>

namespace flash_attention::cpu {

/// Whether others need the processors. A team of OpenMP waits for all of its threads, which takes time slices then. Once
/// two of 16 teams had a thread that came late, the pool, whose caller waits for no thread that has not begun, has the
/// loops of the next second. One late thread says nothing: a virtual processor that was away for a moment makes one, and
/// beside a team that another library keeps awake the pool is the slower one.
class Contention {
 public:
  using Time = std::chrono::steady_clock::time_point;

  void saw_team() { teams_since_late_.fetch_add(1, std::memory_order_relaxed); }

  void saw_late_team(Time now) {
    if (teams_since_late_.exchange(0, std::memory_order_relaxed) >= 15) return;
    until_.store((now + std::chrono::seconds(1)).time_since_epoch().count(), std::memory_order_relaxed);
  }

  bool is_recent(Time now) const {
    const Time::rep until = until_.load(std::memory_order_relaxed);
    return until != 0 && now.time_since_epoch().count() < until;
  }

 private:
  std::atomic<std::int64_t> teams_since_late_{15};  // none has been late
  std::atomic<Time::rep> until_{0};
};

}  // namespace flash_attention::cpu
