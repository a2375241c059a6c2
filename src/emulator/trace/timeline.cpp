#include "emulator/trace/timeline.h"

#include <algorithm>
#include <cmath>
#include <map>
#include <queue>
#include <tuple>
#include <utility>

#include "flash_attention/error.h"

namespace flash_attention::emulator {
namespace {

constexpr int schedulers = 4;                   // of an SM; each has a quarter of its units
constexpr double longest_turn = 64;             // clocks for which a warp has a unit to itself while others want it
constexpr double not_yet = -1;                  // of a time
constexpr std::uint64_t bytes_of_access = 512;  // of a warp instruction: 16 bytes a lane

/// What a warp can wait for.
enum class GateKind : int { named, cluster, phase, product };
using GateKey = std::tuple<GateKind, int, int, std::uint32_t, std::int64_t>;  // kind, copy, block, place, number

struct Gate {
  int missing = 0;        // contributions that have not been made
  double time = not_yet;  // of the last one
  double latency = 0;
  std::vector<int> waiters;
};

/// A group of asynchronous copies of one warp, as its commit left it.
struct Group {
  double read = 0, done = 0;
};

struct WarpState {
  const WarpRecord* record = nullptr;
  int copy = 0, block = 0, index = 0;  // each block of a cluster has an SM of its own
  std::size_t next = 0;                // event
  int turns = 0, turn = 0;             // of the work before it; turns 0: not begun
  double parked_at = not_yet;
  Group open_stores{}, open_copies{};
  std::vector<Group> stores{}, copies{};
  std::vector<std::int64_t> commits{};  // of products: number of the last one before each
  std::int64_t products = 0;
};

struct Server {
  double free = 0;
};

/// An SM's units: `shared` and `l2` once, the others for each scheduler. A wgmma takes the tensor units of all four.
struct Sm {
  std::array<std::array<Server, schedulers>, num_units> of;
};

class Layout {
 public:
  Layout(std::span<const BlockRecord> cluster, const Machine& machine, const Share& share, bool keeps)
      : machine_(machine),
        l2_bytes_(std::min(machine.l2_bytes, machine.l2_bytes_of_all / share.busy_sms)),
        keeps_(keeps),
        num_blocks_(static_cast<int>(cluster.size())),
        sms_(cluster.size()) {
    for (int copy = 0; copy < share.resident; ++copy) {
      for (std::size_t b = 0; b < cluster.size(); ++b) {
        for (std::size_t w = 0; w < cluster[b].warps.size(); ++w) {
          warps_.push_back(
              {.record = &cluster[b].warps[w], .copy = copy, .block = static_cast<int>(b), .index = static_cast<int>(w)});
          count_contributions(warps_.back());
        }
      }
    }
  }

  Timeline run() {
    for (std::size_t w = 0; w < warps_.size(); ++w) queue_.push({0, static_cast<int>(w)});
    while (!queue_.empty()) {
      const auto [time, warp] = queue_.top();
      queue_.pop();
      step(warp, time);
    }
    require_all_ended();
    double lived = 0;
    for (const double end : ends_) timeline_.clocks = std::max(timeline_.clocks, end), lived += end;
    timeline_.waiting = lived > 0 ? waited_ / lived : 0;
    for (std::size_t u = 0; u < num_units; ++u) timeline_.busy[u] = busy_[u] / num_blocks_;
    timeline_.critical =
        static_cast<Unit>(std::max_element(timeline_.busy.begin(), timeline_.busy.end()) - timeline_.busy.begin());
    return std::move(timeline_);
  }

 private:
  /// A record that came from a run can be laid out; one that was made wrong cannot.
  void require_all_ended() const {
    std::string stuck;
    for (const WarpState& warp : warps_) {
      if (warp.parked_at == not_yet) continue;
      const Event& event = warp.record->events[warp.next];
      stuck += "\n  block " + std::to_string(warp.block) + ", warp " + std::to_string(warp.index) + ", event " +
               std::to_string(warp.next) + ": " + to_string(event.kind) + " at " + std::to_string(event.place.offset) +
               ", number " + std::to_string(event.number);
    }
    if (!stuck.empty()) throw Error(ErrorCode::internal, "trace: warps wait for what nobody does:" + stuck);
  }

  GateKey key(GateKind kind, const WarpState& warp, int block, std::uint32_t place, std::int64_t number) const {
    return {kind, warp.copy, block, place, number};
  }
  GateKey product_key(const WarpState& warp, std::int64_t number) const {
    return key(GateKind::product, warp, warp.block, static_cast<std::uint32_t>(warp.index / 4), number);
  }

  void count_contributions(const WarpState& warp) {
    for (const Event& event : warp.record->events) {
      for_each_gate(warp, event, [&](const GateKey& k, double latency) {
        Gate& gate = gates_[k];
        ++gate.missing;
        gate.latency = latency;
      });
      if (event.kind == EventKind::wgmma) ++gates_[product_key(warp, event.number)].missing;
    }
  }

  /// Calls visit for each gate, other than products, to which an event contributes.
  template <typename Visit>
  void for_each_gate(const WarpState& warp, const Event& event, Visit visit) const {
    switch (event.kind) {
      case EventKind::barrier_arrive:
      case EventKind::barrier_sync:
        return visit(key(GateKind::named, warp, warp.block, event.place.offset, event.number), machine_.barrier_latency);
      case EventKind::cluster_arrive:
        return visit(key(GateKind::cluster, warp, 0, 0, event.number), machine_.barrier_latency);
      case EventKind::mbarrier_arrive:
        return visit(key(GateKind::phase, warp, event.place.rank, event.place.offset, event.number),
                     machine_.mbarrier_latency);
      case EventKind::bulk_load:
      case EventKind::store_async:
        for (int block = 0; block < num_blocks_; ++block) {
          if (event.targets >> block & 1u)
            visit(key(GateKind::phase, warp, block, event.barrier, event.number), machine_.mbarrier_latency);
        }
        return;
      default:
        return;
    }
  }

  void contribute(const GateKey& k, double time) {
    Gate& gate = gates_[k];
    gate.time = std::max(gate.time, time);
    if (--gate.missing > 0) return;
    for (const int waiter : gate.waiters) resume(waiter, gate.time + gate.latency);
    gate.waiters.clear();
  }

  void resume(int w, double time) {
    WarpState& warp = warps_[static_cast<std::size_t>(w)];
    time = std::max(time, warp.parked_at);
    note_wait(warp, warp.parked_at, time);
    warp.parked_at = not_yet;
    advance(warp);
    queue_.push({time, w});
  }

  void advance(WarpState& warp) { ++warp.next, warp.turns = 0, warp.turn = 0; }

  /// True if the gate is open; `time` moves to when it opened. If nobody contributes to it, the warp waits for ever.
  bool passes(const GateKey& k, int w, double& time) {
    Gate& gate = gates_[k];
    if (gate.missing > 0 || gate.time == not_yet) {
      gate.waiters.push_back(w);
      return false;
    }
    time = std::max(time, gate.time + gate.latency);
    return true;
  }

  /// Takes `clocks` of a unit from `time` on; when it is done.
  double take(int sm, Unit unit, int scheduler, double clocks, double time, const char* what) {
    if (clocks <= 0) return time;
    const bool of_sm = unit == Unit::shared || unit == Unit::l2;
    Server& server = sms_[static_cast<std::size_t>(sm)]
                         .of[static_cast<std::size_t>(unit)][of_sm ? 0 : static_cast<std::size_t>(scheduler)];
    const double begin = std::max(time, server.free);
    server.free = begin + clocks;
    busy_[static_cast<std::size_t>(unit)] += of_sm ? clocks : clocks / schedulers;
    if (keeps_) note_unit(sm, unit, begin, server.free, what);
    return server.free;
  }

  void note_unit(int sm, Unit unit, double begin, double end, const char* what) {
    if (!timeline_.units.empty()) {
      UnitSpan& last = timeline_.units.back();
      if (last.sm == sm && last.unit == unit && last.what == what && begin <= last.end + 1) {
        last.end = std::max(last.end, end);
        return;
      }
    }
    timeline_.units.push_back({sm, unit, begin, end, what});
  }

  void note(const WarpState& warp, double begin, double end, bool waits, std::string what) {
    if (!keeps_ || end <= begin) return;
    timeline_.warps.push_back({warp.copy * num_blocks_ + warp.block, warp.index, begin, end, waits, std::move(what)});
  }

  void note_wait(const WarpState& warp, double begin, double end) {
    waited_ += std::max(0.0, end - begin);
    const Event& event = warp.record->events[warp.next];
    std::string what = to_string(event.kind);
    if (event.kind == EventKind::mbarrier_wait) what += " at " + std::to_string(event.place.offset);
    if (event.kind == EventKind::barrier_sync) what += " " + std::to_string(event.place.offset);
    note(warp, begin, end, true, std::move(what));
  }

  /// Clocks of each unit of one scheduler, or of the SM.
  std::array<double, num_units> clocks_of(const Work& work) const {
    const auto lanes = [](std::uint64_t count) { return static_cast<double>(count); };
    const double instructions =
        lanes(work.fma + work.special + work.simple) / 32 + lanes(work.warp_instructions) +
        lanes((work.shared_bytes + work.load_bytes + work.store_bytes + work.copy_bytes) / bytes_of_access);
    const std::uint64_t through_l2 = work.load_bytes + work.store_bytes + work.copy_bytes;
    return {lanes(work.mma_flops) / (machine_.mma_flops / schedulers),
            lanes(work.special) / (machine_.special / schedulers),
            lanes(work.fma + work.simple) / (machine_.fma / schedulers),
            instructions / (machine_.issue / schedulers),
            lanes(work.shared_bytes + work.copy_bytes) / machine_.shared_bytes,
            lanes(through_l2) / l2_bytes_};
  }

  const Work& work_before(const WarpState& warp) const {
    return warp.next < warp.record->events.size() ? warp.record->events[warp.next].before : warp.record->after;
  }

  /// One turn of the work before the next event, or the event.
  void step(int w, double time) {
    WarpState& warp = warps_[static_cast<std::size_t>(w)];
    const Work& work = work_before(warp);
    if (warp.turns == 0) {
      const auto clocks = clocks_of(work);
      const double longest = *std::max_element(clocks.begin(), clocks.end());
      warp.turns = work.empty() ? 0 : std::max(1, static_cast<int>(std::ceil(longest / longest_turn)));
      if (work.copy_bytes > 0) {
        // Copies are on their way until the group's wait.
        warp.open_copies.done = std::max(warp.open_copies.done, time + machine_.load_latency);
      }
    }
    if (warp.turn < warp.turns) return do_work(w, warp, work, time);
    if (warp.next == warp.record->events.size()) {
      ends_.push_back(time);
      return;
    }
    const double before = time;
    if (!do_event(w, warp, warp.record->events[warp.next], time)) {
      warp.parked_at = before;
      return;
    }
    if (time > before) note_wait(warp, before, time);
    advance(warp);
    queue_.push({time, w});
  }

  void do_work(int w, WarpState& warp, const Work& work, double time) {
    const auto clocks = clocks_of(work);
    const int scheduler = warp.index % schedulers;
    double end = time;
    for (int u = 0; u < num_units; ++u) {
      const double done = take(warp.block, static_cast<Unit>(u), scheduler,
                               clocks[static_cast<std::size_t>(u)] / warp.turns, time, "instructions");
      const bool copies = static_cast<Unit>(u) == Unit::l2 && work.load_bytes + work.store_bytes == 0;
      if (copies)
        warp.open_copies.done = std::max(warp.open_copies.done, done);
      else
        end = std::max(end, done);
    }
    if (warp.turn == 0 && work.load_bytes > 0) end += machine_.load_latency;
    ++warp.turn;
    note(warp, time, end, false, describe(work));
    queue_.push({end, w});
  }

  static std::string describe(const Work& work) {
    std::string text;
    const auto add = [&](const char* name, std::uint64_t count) {
      if (count > 0) text += (text.empty() ? "" : ", ") + std::to_string(count) + " " + name;
    };
    add("exponentials", work.special);
    add("fma", work.fma);
    add("other arithmetic", work.simple);
    add("mma FLOPs", work.mma_flops);
    add("bytes of shared memory", work.shared_bytes);
    add("bytes loaded", work.load_bytes);
    add("bytes stored", work.store_bytes);
    add("bytes copied", work.copy_bytes);
    add("warp instructions", work.warp_instructions);
    return text;
  }

  /// False: the warp is parked at a gate. Otherwise `time` is when it goes on.
  bool do_event(int w, WarpState& warp, const Event& event, double& time) {
    switch (event.kind) {
      case EventKind::wgmma:
        issue_product(warp, event, time);
        return true;
      case EventKind::wgmma_commit:
        warp.commits.push_back(warp.products);
        return true;
      case EventKind::wgmma_wait: {
        if (warp.commits.size() <= event.amount) return true;
        const std::int64_t last = warp.commits[warp.commits.size() - 1 - event.amount];
        return last == 0 || passes(product_key(warp, last), w, time);
      }
      case EventKind::mbarrier_wait:
        return event.number < 0 ||
               passes(key(GateKind::phase, warp, event.place.rank, event.place.offset, event.number), w, time);
      case EventKind::barrier_sync: {
        const GateKey k = key(GateKind::named, warp, warp.block, event.place.offset, event.number);
        contribute(k, time);
        return passes(k, w, time);
      }
      case EventKind::cluster_wait:
        return passes(key(GateKind::cluster, warp, 0, 0, event.number), w, time);
      case EventKind::barrier_arrive:
      case EventKind::cluster_arrive:
      case EventKind::mbarrier_arrive:
        for_each_gate(warp, event, [&](const GateKey& k, double) { contribute(k, time); });
        return true;
      case EventKind::bulk_load: {
        const double loaded = move(warp.block, event.amount, time, "bulk load") + machine_.bulk_latency;
        for_each_gate(warp, event, [&](const GateKey& k, double) { contribute(k, loaded); });
        return true;
      }
      case EventKind::store_async: {
        const double stored = move(warp.block, event.amount, time, "st.async") + machine_.load_latency;
        for_each_gate(warp, event, [&](const GateKey& k, double) { contribute(k, stored); });
        return true;
      }
      case EventKind::bulk_store: {
        const double read = take(warp.block, Unit::shared, 0, event.amount / machine_.shared_bytes, time, "bulk store");
        const double done = take(warp.block, Unit::l2, 0, event.amount / l2_bytes_, read, "bulk store");
        warp.open_stores.read = std::max(warp.open_stores.read, read + machine_.barrier_latency);
        warp.open_stores.done = std::max(warp.open_stores.done, done + machine_.load_latency);
        return true;
      }
      case EventKind::bulk_commit:
        warp.stores.push_back(std::exchange(warp.open_stores, {}));
        return true;
      case EventKind::bulk_wait:
      case EventKind::bulk_wait_read:
        for (std::size_t i = 0; i + event.amount < warp.stores.size(); ++i)
          time = std::max(time, event.kind == EventKind::bulk_wait ? warp.stores[i].done : warp.stores[i].read);
        return true;
      case EventKind::copy_commit:
        warp.copies.push_back(std::exchange(warp.open_copies, {}));
        return true;
      case EventKind::copy_wait:
        for (std::size_t i = 0; i + event.amount < warp.copies.size(); ++i) time = std::max(time, warp.copies[i].done);
        return true;
    }
    return true;
  }

  double move(int sm, std::uint32_t bytes, double time, const char* what) {
    const double through = take(sm, Unit::l2, 0, bytes / l2_bytes_, time, what);
    take(sm, Unit::shared, 0, bytes / machine_.shared_bytes, through, what);
    return through;
  }

  /// Begins when the last of the four warps has issued it, after the products before it.
  void issue_product(WarpState& warp, const Event& event, double time) {
    warp.products = event.number;
    const GateKey k = product_key(warp, event.number);
    Gate& gate = gates_[k];
    gate.latency = machine_.wgmma_latency;
    gate.time = std::max(gate.time, time);
    if (gate.missing == 1) {
      const double flops = 2.0 * 64 * event.amount * 16;
      const double clocks = flops / machine_.wgmma_flops;
      auto& tensor = sms_[static_cast<std::size_t>(warp.block)].of[static_cast<std::size_t>(Unit::tensor)];
      double begin = gate.time;
      for (const Server& server : tensor) begin = std::max(begin, server.free);
      const std::uint32_t read = 32 * event.amount + (event.a_in_shared ? 2048 : 0);
      take(warp.block, Unit::shared, 0, read / machine_.shared_bytes, begin, "wgmma operands");
      for (Server& server : tensor) server.free = begin + clocks;
      busy_[static_cast<std::size_t>(Unit::tensor)] += clocks;
      if (keeps_) note_unit(warp.block, Unit::tensor, begin, begin + clocks, "wgmma");
      gate.time = begin + clocks;
    }
    contribute(k, gate.time);
  }

  const Machine& machine_;
  const double l2_bytes_;  // per clock for this SM
  const bool keeps_;
  const int num_blocks_;
  std::vector<Sm> sms_;
  std::vector<WarpState> warps_;
  std::map<GateKey, Gate> gates_;
  using Turn = std::pair<double, int>;
  std::priority_queue<Turn, std::vector<Turn>, std::greater<>> queue_;
  std::vector<double> ends_;
  std::array<double, num_units> busy_{};
  double waited_ = 0;
  Timeline timeline_;
};

constexpr Machine a100{.name = "A100",
                       .clock_ghz = 1.41,
                       .num_sms = 108,
                       .wgmma_flops = 2048,
                       .mma_flops = 2048,
                       .special = 16,
                       .fma = 64,
                       .issue = 4,
                       .shared_bytes = 128,
                       .l2_bytes = 64,
                       .l2_bytes_of_all = 5120,
                       .memory_bytes_s = 2.0e12,
                       .matrix_flops_s = 312e12,
                       .load_latency = 261,
                       .bulk_latency = 261,
                       .wgmma_latency = 0,
                       .barrier_latency = 43,
                       .mbarrier_latency = 59,
                       .launch_s = 2.85e-6};

constexpr Machine h200{.name = "H200",
                       .clock_ghz = 1.755,
                       .num_sms = 132,
                       .wgmma_flops = 4096,
                       .mma_flops = 2560,
                       .special = 14.7,
                       .fma = 128,
                       .issue = 4,
                       .shared_bytes = 128,
                       .l2_bytes = 64,
                       .l2_bytes_of_all = 4505,
                       .memory_bytes_s = 4.37e12,
                       .matrix_flops_s = 770e12,
                       .load_latency = 263,
                       .bulk_latency = 263 + 170,
                       .wgmma_latency = 32,
                       .barrier_latency = 43,
                       .mbarrier_latency = 59,
                       .launch_s = 2.85e-6};

/// The operations of products on tensor cores.
double flops_of(const BlockRecord& block) {
  double flops = 0;
  for (std::size_t w = 0; w < block.warps.size(); ++w) {
    flops += static_cast<double>(block.warps[w].after.mma_flops);
    for (const Event& event : block.warps[w].events) {
      flops += static_cast<double>(event.before.mma_flops);
      if (event.kind == EventKind::wgmma && w % 4 == 0) flops += 2.0 * 64 * 16 * event.amount;
    }
  }
  return flops;
}

/// The clocks of any cluster of the grid: those of the nearest recorded one.
double clocks_of_cluster(const std::vector<std::int64_t>& recorded, const std::vector<double>& clocks,
                         std::int64_t cluster) {
  const auto after = std::lower_bound(recorded.begin(), recorded.end(), cluster);
  if (after == recorded.end()) return clocks.back();
  const auto at = static_cast<std::size_t>(after - recorded.begin());
  if (at == 0 || *after - cluster < cluster - recorded[at - 1]) return clocks[at];
  return clocks[at - 1];
}

}  // namespace

const char* to_string(Unit unit) {
  switch (unit) {
    case Unit::tensor:
      return "tensor cores";
    case Unit::special:
      return "exponentials";
    case Unit::fma:
      return "fp32 arithmetic";
    case Unit::issue:
      return "instruction issue";
    case Unit::shared:
      return "shared memory";
    case Unit::l2:
      return "L2";
  }
  return "?";
}

std::vector<Rate> Machine::rates() const {
  const bool hopper = wgmma_latency > 0;
  const char* sheet = hopper ? "data sheet of the H200" : "data sheet of the A100";
  const char* micro = "flash-attention bench micro on an H200";
  const char* papers = hopper ? "arXiv 2402.13499 and 2501.12084, an H100" : "arXiv 2402.13499, an A100";
  const char* borrowed = hopper ? micro : "as the H200";
  std::vector<Rate> rates{{"clock", clock_ghz, "GHz", sheet}, {"SMs", static_cast<double>(num_sms), "", sheet}};
  if (hopper)
    rates.push_back({"wgmma, 16 bits", wgmma_flops, "FLOPs per clock and SM", "data sheet; bench micro reaches 99 %"});
  rates.push_back({"mma.sync, 16 bits", mma_flops, "FLOPs per clock and SM",
                   hopper ? "arXiv 2402.13499: 62 % of wgmma" : "data sheet of the A100"});
  rates.push_back({"exponentials", special, "per clock and SM", hopper ? micro : "CUDA programming guide"});
  rates.push_back({"fp32 lanes", fma, "per clock and SM", "CUDA programming guide"});
  rates.push_back({"warp instructions issued", issue, "per clock and SM", "CUDA programming guide"});
  rates.push_back({"shared memory", shared_bytes, "bytes per clock and SM", "CUDA programming guide"});
  rates.push_back({"L2 to one SM", l2_bytes, "bytes per clock", "NVIDIA's white paper"});
  rates.push_back({"L2 to all SMs", l2_bytes_of_all, "bytes per clock",
                   hopper ? "bench/l2_reads.py on an H200: 8.92 TB/s at 1.98 GHz" : "NVIDIA's white paper"});
  rates.push_back({"memory", memory_bytes_s / 1e12, "TB/s", hopper ? "docs/lab: a plain read on an H200" : sheet});
  rates.push_back({"a long matrix product", matrix_flops_s / 1e12, "TFLOP/s",
                   hopper ? "torch.matmul on an H200, bench/results/h200/paper.json" : sheet});
  rates.push_back({"latency of a load from L2", load_latency, "clocks", papers});
  rates.push_back({"latency of a bulk copy from L2", bulk_latency, "clocks", papers});
  if (hopper) rates.push_back({"latency of a product", wgmma_latency, "clocks", papers});
  rates.push_back({"a turn by a named barrier", barrier_latency, "clocks", borrowed});
  rates.push_back({"a turn by an mbarrier", mbarrier_latency, "clocks", borrowed});
  rates.push_back({"an empty kernel", launch_s * 1e6, "us", hopper ? "docs/lab: measured on an H200" : "as the H200"});
  return rates;
}

Machine machine_of(int arch, int num_sms) {
  if (arch != 80 && arch != 90)
    throw Error(ErrorCode::unavailable, "trace: got sm_" + std::to_string(arch) + "; there are rates of sm_80 and sm_90");
  Machine machine = arch == 80 ? a100 : h200;
  if (num_sms == 0) return machine;
  const double share = static_cast<double>(num_sms) / machine.num_sms;
  machine.num_sms = num_sms;
  machine.l2_bytes_of_all *= share, machine.memory_bytes_s *= share, machine.matrix_flops_s *= share;
  return machine;
}

std::int64_t LaunchRecord::num_blocks() const { return std::int64_t{grid[0]} * grid[1] * grid[2]; }

Share share_of(const LaunchRecord& launch, const Machine& machine) {
  const std::int64_t blocks = launch.num_blocks();
  const std::int64_t per_sm = (blocks + machine.num_sms - 1) / machine.num_sms;
  return {.resident = static_cast<int>(std::clamp<std::int64_t>(per_sm, 1, launch.blocks_per_sm)),
          .busy_sms = static_cast<int>(std::min<std::int64_t>(blocks, machine.num_sms))};
}

Timeline lay_out(std::span<const BlockRecord> cluster, const Machine& machine, const Share& share, bool keeps_spans) {
  return Layout(cluster, machine, share, keeps_spans).run();
}

Prediction predict(const LaunchRecord& launch, const Machine& machine) {
  const Share share = share_of(launch, machine);
  Prediction result{.unit = launch.unit, .resident = share.resident, .bound = {}};
  if (launch.blocks.empty()) return result;
  const auto size = static_cast<std::size_t>(launch.cluster);
  std::vector<double> clocks;
  std::array<double, num_units> busy{};
  double sum = 0, products = 0;
  for (std::size_t i = 0; i < launch.clusters.size(); ++i) {
    const std::span<const BlockRecord> cluster{launch.blocks.data() + i * size, size};
    const Timeline timeline = lay_out(cluster, machine, share, false);
    clocks.push_back(timeline.clocks);
    sum += timeline.clocks;
    for (std::size_t u = 0; u < num_units; ++u) busy[u] += timeline.busy[u];
    for (const BlockRecord& block : cluster) products += flops_of(block);
  }
  result.block_clocks = sum / static_cast<double>(clocks.size());

  // Clusters go to the first place that is free, in their order.
  const std::int64_t total = launch.num_blocks() / launch.cluster;
  const int places = machine.num_sms / launch.cluster * result.resident;
  std::priority_queue<double, std::vector<double>, std::greater<>> free;
  double last = 0;
  for (std::int64_t cluster = 0; cluster < total; ++cluster) {
    double begin = 0;
    if (static_cast<int>(free.size()) >= places) begin = free.top(), free.pop();
    free.push(begin + clocks_of_cluster(launch.clusters, clocks, cluster));
    last = std::max(last, begin + clocks_of_cluster(launch.clusters, clocks, cluster));
  }
  const double by_clock = last / (machine.clock_ghz * 1e9);
  const double flops = products / static_cast<double>(clocks.size()) * static_cast<double>(total);
  const double by_power = flops / machine.matrix_flops_s;
  result.seconds = std::max(by_clock, by_power) + machine.launch_s;
  const auto most = std::max_element(busy.begin(), busy.end());
  result.bound = by_power > by_clock ? "power"
                 : *most < 0.6 * sum ? "latency"
                                     : to_string(static_cast<Unit>(most - busy.begin()));
  return result;
}

}  // namespace flash_attention::emulator
