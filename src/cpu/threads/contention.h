#pragma once

#include <atomic>
#include <bit>
#include <chrono>
#include <cstdint>

namespace flash_attention::cpu {

/// Whether other processes need the processors. A team of OpenMP waits for all of its threads, which then takes time
/// slices. If that happens regularly (in eight of the last 16 teams a thread was late), the loops of the next second
/// run on the pool, whose caller never waits for a thread that has not begun. A few late teams mean nothing: one is
/// late if a virtual processor is away for a moment, and beside a team that another library keeps awake the pool is
/// several times slower.
class Contention {
 public:
  using Time = std::chrono::steady_clock::time_point;

  void saw_team() { note(0); }

  void saw_late_team(Time now) {
    if (std::popcount(note(1)) < 8) return;
    until_.store((now + std::chrono::seconds(1)).time_since_epoch().count(), std::memory_order_relaxed);
  }

  bool is_recent(Time now) const {
    const Time::rep until = until_.load(std::memory_order_relaxed);
    return until != 0 && now.time_since_epoch().count() < until;
  }

 private:
  /// Two threads may note at the same time, and lose one note.
  std::uint16_t note(unsigned late) {
    const auto last = static_cast<std::uint16_t>(last_teams_.load(std::memory_order_relaxed) << 1 | late);
    last_teams_.store(last, std::memory_order_relaxed);
    return last;
  }

  std::atomic<std::uint16_t> last_teams_{0};  // one bit for each team, the last one lowest: it was late
  std::atomic<Time::rep> until_{0};
};

}  // namespace flash_attention::cpu
