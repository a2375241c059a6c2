#include "emulator/instructions/mbarrier.h"

#include <cstring>

namespace flash_attention::emulator {
namespace {

/// The 64 bits of an mbarrier, in our own layout. Uninitialised shared memory is all ones.
struct State64 {
  std::uint64_t phase : 1;
  std::uint64_t count : 20;    // arrivals that a phase needs
  std::uint64_t pending : 20;  // arrivals that are missing
  std::int64_t bytes : 23;     // expected and not landed yet; negative if they land first
};
static_assert(sizeof(State64) == 8);
constexpr std::uint64_t uninitialised_count = (1u << 20) - 1;
constexpr int max_bytes = (1 << 20) - 1;

State64 read_state(const unsigned char* bytes) {
  State64 state;
  std::memcpy(&state, bytes, sizeof state);
  return state;
}

State64 read_state(const SharedPlace& place) { return read_state(place.generic()); }

void write_state(const SharedPlace& place, const State64& state) {
  place.block->shared.write_both(place.offset, &state, sizeof state);
}

State64 read_initialised(const SharedPlace& place) {
  const State64 state = read_state(place);
  if (state.count == uninitialised_count || state.count == 0) Scheduler::current().fail("the mbarrier was not initialised");
  return state;
}

/// Ends the phase if all arrivals and bytes are in, and wakes the threads that wait for it.
void complete_phase(const SharedPlace& place, State64 state) {
  const bool complete = state.pending == 0 && state.bytes == 0;
  if (complete) {
    state.phase ^= 1;
    state.pending = state.count;
  }
  write_state(place, state);
  if (!complete) return;
  if (place.block->recorder) place.block->recorder->phase_completed(static_cast<std::uint32_t>(place.offset));
  Races& races = Scheduler::current().races();
  races.complete_phase(races.mbarrier(*place.block, place.offset));
  const std::uint32_t address = static_cast<std::uint32_t>(place.offset) + shared_window;
  Scheduler::current().wake_where([&](const Thread& thread) {
    return thread.wait == Wait::mbarrier && thread.block == place.block && thread.wait_key == address &&
           thread.wait_detail != state.phase;
  });
}

/// Used by both waits: whether the phase of that parity has completed.
bool completed(unsigned address, unsigned parity, const char* doing) {
  Scheduler& scheduler = Scheduler::current();
  Thread& thread = scheduler.running();
  thread.doing = doing;
  if (parity > 1) scheduler.fail("parity " + std::to_string(parity) + "; allowed are 0 and 1");
  const SharedPlace place = locate(address, 8, 8);
  if (place.block != thread.block) scheduler.fail("an mbarrier of another block cannot be waited for");
  return read_initialised(place).phase != parity;
}

}  // namespace

void mbarrier_init(unsigned address, int arrivals) {
  Scheduler& scheduler = Scheduler::current();
  scheduler.running().doing = "mbarrier_init";
  if (arrivals < 1 || arrivals >= static_cast<int>(uninitialised_count)) {
    scheduler.fail("the arrival count is " + std::to_string(arrivals) + "; allowed are 1 to 1048574");
  }
  const auto count = static_cast<std::uint64_t>(arrivals);
  const SharedPlace place = locate(address, 8, 8);
  write_state(place, {0, count & 0xfffff, count & 0xfffff, 0});
  place.block->hidden_mbarriers[place.offset] = scheduler.running().index;
  scheduler.races().write(scheduler.running(), place, 8);
}

void mbarrier_arrive(unsigned address, int arrivals, int bytes) {
  Scheduler& scheduler = Scheduler::current();
  scheduler.running().doing = bytes == 0 ? "mbarrier_arrive" : "mbarrier_arrive_expect_tx";
  const SharedPlace place = locate(address, 8, 8);
  State64 state = read_initialised(place);
  if (state.pending < static_cast<std::uint64_t>(arrivals)) {
    scheduler.fail("more arrivals in a phase than the " + std::to_string(state.count) +
                   " the mbarrier was initialised for");
  }
  if (bytes < 0 || state.bytes + bytes > max_bytes) scheduler.fail("a phase can expect at most 1048575 bytes");
  state.bytes = state.bytes + bytes;
  state.pending -= static_cast<std::uint64_t>(arrivals);
  Races& races = scheduler.races();
  races.read(scheduler.running(), place, 8);  // it has been initialised
  races.release(scheduler.running(), races.mbarrier(*place.block, place.offset).arrived);
  if (Recorder* recorder = scheduler.running().block->recorder.get()) {
    const auto offset = static_cast<std::uint32_t>(place.offset);
    recorder->add(scheduler.running(), {.kind = EventKind::mbarrier_arrive,
                                        .place = {place.block->rank, offset},
                                        .number = place.block->recorder->phase(offset),
                                        .amount = static_cast<std::uint32_t>(arrivals)});
  }
  complete_phase(place, state);
}

void mbarrier_complete(const SharedPlace& place, int bytes, const char* doing) {
  State64 state = read_state(place);
  if (state.count == uninitialised_count || state.count == 0) {
    return Scheduler::current().fail_async(*place.block, doing, "the mbarrier was not initialised");
  }
  if (state.bytes - bytes < -max_bytes) {
    return Scheduler::current().fail_async(*place.block, doing, "more bytes landed than the mbarrier can count");
  }
  state.bytes = state.bytes - bytes;
  complete_phase(place, state);
}

void mbarrier_arrive_later(const SharedPlace& place, const Clocks& known, const char* doing) {
  Scheduler& scheduler = Scheduler::current();
  State64 state = read_state(place);
  if (state.count == uninitialised_count || state.count == 0)
    return scheduler.fail_async(*place.block, doing, "the mbarrier was not initialised");
  if (state.pending == 0) {
    return scheduler.fail_async(
        *place.block, doing,
        "more arrivals in a phase than the " + std::to_string(state.count) + " the mbarrier was initialised for");
  }
  --state.pending;
  join(scheduler.races().mbarrier(*place.block, place.offset).arrived, known);
  complete_phase(place, state);
}

bool mbarrier_test(unsigned address, unsigned parity) {
  if (!completed(address, parity, "mbarrier_test")) {
    Scheduler::current().yield();
    return false;
  }
  mbarrier_wait(address, parity);
  return true;
}

void mbarrier_wait(unsigned address, unsigned parity) {
  Scheduler& scheduler = Scheduler::current();
  ++scheduler.counters().mbarrier_waits;
  if (!completed(address, parity, "mbarrier_wait")) {
    scheduler.suspend(Wait::mbarrier, address, parity);
    // A GPU's thread polls. If it slept while two phases completed, it would see neither.
    if (!completed(address, parity, "mbarrier_wait"))
      scheduler.fail("the phase of parity " + std::to_string(parity) +
                     " completed, and the next, before the thread looked");
  }
  Thread& thread = scheduler.running();
  const SharedPlace place = locate(address, 8, 8);
  scheduler.races().read(thread, place, 8);
  scheduler.races().acquire(thread, scheduler.races().mbarrier(*place.block, place.offset).completed);
  if (thread.block->recorder) thread.block->recorder->mbarrier_wait(thread, static_cast<std::uint32_t>(place.offset));
}

void mbarrier_init_fence() {
  Thread& thread = Scheduler::current().running();
  thread.doing = "mbarrier_init_fence";
  std::erase_if(thread.block->hidden_mbarriers, [&](const auto& hidden) { return hidden.second == thread.index; });
}

void require_visible_mbarrier(const SharedPlace& place) {
  if (place.block->hidden_mbarriers.contains(place.offset)) {
    Scheduler::current().fail("mbarrier_init_fence is missing after mbarrier_init: the copy cannot know the mbarrier");
  }
}

std::string describe_mbarrier(const Block& block, unsigned address) {
  const State64 state = read_state(block.shared.generic() + (address - shared_window));
  return std::to_string(state.count - state.pending) + " of " + std::to_string(state.count) + " arrivals, " +
         std::to_string(state.bytes) + " bytes expected that have not landed";
}

}  // namespace flash_attention::emulator
