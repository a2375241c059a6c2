#include "emulator/trace/recorder.h"

#include <algorithm>
#include <mutex>
#include <utility>

#include "emulator/machine/scheduler.h"

namespace flash_attention::emulator {
namespace {

std::mutex mutex;
std::optional<RecordRequest> requested;
std::vector<LaunchRecord> kept;

bool may_be_of_one_lane(EventKind kind) {
  switch (kind) {
    case EventKind::mbarrier_arrive:
    case EventKind::bulk_load:
    case EventKind::bulk_store:
    case EventKind::bulk_commit:
    case EventKind::bulk_wait:
    case EventKind::bulk_wait_read:
    case EventKind::store_async:
      return true;
    default:
      return false;
  }
}

}  // namespace

Work& Work::operator+=(const Work& other) {
  fma += other.fma, special += other.special, simple += other.simple, warp_instructions += other.warp_instructions;
  shared_bytes += other.shared_bytes, load_bytes += other.load_bytes, store_bytes += other.store_bytes;
  mma_flops += other.mma_flops, copy_bytes += other.copy_bytes;
  return *this;
}

bool Work::empty() const {
  return fma + special + simple + warp_instructions + shared_bytes + load_bytes + store_bytes + mma_flops + copy_bytes == 0;
}

const char* to_string(EventKind kind) {
  switch (kind) {
    case EventKind::barrier_arrive:
      return "bar.arrive";
    case EventKind::barrier_sync:
      return "bar.sync";
    case EventKind::cluster_arrive:
      return "barrier.cluster.arrive";
    case EventKind::cluster_wait:
      return "barrier.cluster.wait";
    case EventKind::mbarrier_arrive:
      return "mbarrier.arrive";
    case EventKind::mbarrier_wait:
      return "mbarrier.wait";
    case EventKind::bulk_load:
      return "bulk load";
    case EventKind::bulk_store:
      return "bulk store";
    case EventKind::bulk_commit:
      return "bulk commit";
    case EventKind::bulk_wait:
      return "bulk wait";
    case EventKind::bulk_wait_read:
      return "bulk wait.read";
    case EventKind::store_async:
      return "st.async";
    case EventKind::copy_commit:
      return "cp.async commit";
    case EventKind::copy_wait:
      return "cp.async wait";
    case EventKind::wgmma:
      return "wgmma";
    case EventKind::wgmma_commit:
      return "wgmma commit";
    case EventKind::wgmma_wait:
      return "wgmma wait";
  }
  return "?";
}

Recorder::Recorder(int rank, int warps)
    : rank_(rank), warps_(static_cast<std::size_t>(warps)), lanes_(static_cast<std::size_t>(warps) * 32) {}

Work& Recorder::work(const Thread& thread) { return lanes_[static_cast<std::size_t>(thread.index)].work; }

Work Recorder::take_work(Lane& lane) {
  Work work = std::exchange(lane.work, {});
  const Arithmetic done = std::exchange(lane.arithmetic, {});
  total_.fma_flops += done.fma_flops;
  work.fma += done.fma_flops / 2, work.special += done.special, work.simple += done.simple;
  return work;
}

std::int64_t Recorder::phase(std::uint32_t offset) const {
  const auto found = phases_.find(offset);
  return found == phases_.end() ? 0 : found->second;
}

void Recorder::add(const Thread& thread, Event event, bool counted) {
  const auto first_lane = static_cast<std::size_t>(thread.index / 32 * 32);
  Lane& lane = lanes_[static_cast<std::size_t>(thread.index)];
  if (counted) event.number = lane.counts[event.kind]++;
  std::vector<Event>& events = warps_[static_cast<std::size_t>(thread.index / 32)].events;
  event.before = {};
  const auto from = events.begin() + static_cast<std::ptrdiff_t>(lane.next);
  auto at = std::find_if(from, events.end(), [&](const Event& other) { return other.same_as(event); });
  if (at == events.end()) {
    // No lane has come here yet. What one lane may do alone stands where that lane is: others may be further. What lanes do
    // together comes after all that any of them has done.
    const std::size_t place = may_be_of_one_lane(event.kind) ? lane.next : events.size();
    at = events.insert(events.begin() + static_cast<std::ptrdiff_t>(place), event);
    for (std::size_t i = 0; i < 32; ++i) {
      if (lanes_[first_lane + i].next > place) ++lanes_[first_lane + i].next;
    }
  } else if (event.kind == EventKind::mbarrier_arrive || event.kind == EventKind::barrier_arrive ||
             event.kind == EventKind::barrier_sync || event.kind == EventKind::store_async ||
             event.kind == EventKind::copy_commit) {
    at->amount += event.amount;
  }
  at->before += take_work(lane);
  lane.next = static_cast<std::size_t>(at - events.begin()) + 1;
}

void Recorder::meet(const Thread& thread) {
  const auto first_lane = static_cast<std::size_t>(thread.index / 32 * 32);
  std::size_t furthest = 0;
  for (std::size_t i = 0; i < 32; ++i) furthest = std::max(furthest, lanes_[first_lane + i].next);
  for (std::size_t i = 0; i < 32; ++i) lanes_[first_lane + i].next = furthest;
}

void Recorder::barrier(const Thread& thread, int id, bool wait) {
  add(thread, {.kind = wait ? EventKind::barrier_sync : EventKind::barrier_arrive,
               .place = {0, static_cast<std::uint32_t>(id)},
               .number = generations_[id],
               .amount = 1});
}

void Recorder::cluster_barrier(const Thread& thread, std::uint32_t generation, bool wait) {
  add(thread, {.kind = wait ? EventKind::cluster_wait : EventKind::cluster_arrive,
               .number = static_cast<std::int64_t>(generation)});
}

void Recorder::mbarrier_wait(const Thread& thread, std::uint32_t offset) {
  add(thread, {.kind = EventKind::mbarrier_wait, .place = {rank_, offset}, .number = phase(offset) - 1});
}

BlockRecord Recorder::finish(Arithmetic& total) {
  for (std::size_t i = 0; i < lanes_.size(); ++i) warps_[i / 32].after += take_work(lanes_[i]);
  total.fma_flops += total_.fma_flops;
  return {.rank = rank_, .warps = std::move(warps_)};
}

std::optional<RecordRequest> recording() {
  const std::lock_guard lock(mutex);
  return requested;
}

void keep_record(LaunchRecord record) {
  const std::lock_guard lock(mutex);
  kept.push_back(std::move(record));
}

void start_recording(const RecordRequest& request) {
  const std::lock_guard lock(mutex);
  requested = request;
  kept.clear();
}

std::vector<LaunchRecord> stop_recording() {
  const std::lock_guard lock(mutex);
  requested.reset();
  return std::exchange(kept, {});
}

}  // namespace flash_attention::emulator
