#include "cli/verbs/micro.h"

#include <algorithm>
#include <cstdio>

#include "api/plain_kernel.h"
#include "cli/measure/array.h"
#include "cli/measure/gpu_clock.h"
#include "cli/output/format.h"
#include "cli/output/report.h"
#include "cli/output/terminal.h"
#include "cli/verb.h"

namespace flash_attention::cli {
namespace {

constexpr int repeat = 256;                       // micro_repeat of kernels/abi/micro.h
constexpr std::int64_t reduced_floats = 4 << 20;  // what micro/reduce adds to: 16 MiB, in L2

/// One configuration of kernels/micro, on every SM.
class Micro {
 public:
  Micro(const DeviceInfo& info, std::string_view name, int warpgroups, const std::string& config, int shared_bytes)
      : info_(info),
        cycles_(info.device, sizeof(std::uint64_t) * static_cast<std::size_t>(info.num_sms)),
        sums_(info.device, sizeof(float) * reduced_floats) {
    problem_ = {
        .batch = 1, .seq_q = reduced_floats, .seq_kv = 1, .heads_q = 1, .heads_kv = 1, .head_dim = 8, .scale = 1.0f};
    problem_.total_q = reduced_floats;
    plan_.kernel = "micro/" + std::string(name);
    plan_.launches.push_back({.unit = plan_.kernel,
                              .entry = "micro_" + std::string(name),
                              .config = "MicroConfig{.warpgroups = " + std::to_string(warpgroups) + config + "}",
                              .grid = {info.num_sms, 1, 1},
                              .block = 128 * warpgroups,
                              .shared_bytes = shared_bytes});
    options_.device = info.device;
    options_.workspace = cycles_.device();
    kernel_ = load_micro_kernel(plan_, info);
    launch();  // warm
  }

  void launch() const {
    const Buffers buffers{.lse = static_cast<float*>(sums_.device())};
    kernel_->launch(problem_, plan_, buffers, options_);
  }

  /// Cycles of a block: the median over the SMs.
  double cycles() const {
    launch();
    cycles_.download();
    const auto* begin = static_cast<const std::uint64_t*>(cycles_.host());
    std::vector<std::uint64_t> sorted(begin, begin + info_.num_sms);
    std::sort(sorted.begin(), sorted.end());
    return static_cast<double>(sorted[sorted.size() / 2]);
  }

  double seconds() const {
    GpuClock clock(info_);
    std::vector<double> samples;
    for (int i = 0; i < 11; ++i) samples.push_back(clock.seconds(nullptr, [&] { launch(); }));
    return to_timing(std::move(samples)).median_s;
  }

 private:
  const DeviceInfo& info_;
  Array cycles_, sums_;
  Problem problem_;
  Plan plan_;
  Options options_;
  std::unique_ptr<Kernel> kernel_;
};

void wgmma(const DeviceInfo& info) {
  Table table({"64 x n x 16", "SS, 1 warpgroup", "SS, 2", "SS, 3", "RS, 1", "RS, 2", "RS, 3"});
  for (const int n : {32, 64, 80, 96, 128, 192, 256}) {
    std::vector<std::string> row{"n = " + std::to_string(n)};
    for (const bool registers : {false, true}) {
      for (const int warpgroups : {1, 2, 3}) {
        if (n > 192 && warpgroups == 3) {  // a thread would have too few registers
          row.push_back("-");
          continue;
        }
        const std::string config = ", .n = " + std::to_string(n) + (registers ? ", .registers = true" : "");
        const Micro micro(info, "wgmma", warpgroups, config, (warpgroups * 64 + n) * 128);
        const double least = 4.0 * repeat * warpgroups * n / 2;  // cycles at 4096 FLOP each
        row.push_back(format("%.0f %%", 100 * least / micro.cycles()));
      }
    }
    table.add(row);
  }
  std::printf("\nmicro/wgmma: part of the tensor cores' peak\n%s", table.text().c_str());
}

void exp2(const DeviceInfo& info) {
  Table table({"by FMA", "1 warpgroup", "2", "3"});
  for (const int polynomials : {0, 1, 2, 4, 8}) {
    std::vector<std::string> row{format("%d of 8", polynomials)};
    for (const int warpgroups : {1, 2, 3}) {
      const Micro micro(info, "exp2", warpgroups, ", .polynomials = " + std::to_string(polynomials), 0);
      row.push_back(format("%.1f", 16.0 * repeat * 128 * warpgroups / micro.cycles()));
    }
    table.add(row);
  }
  std::printf("\nmicro/exp2: exponentials in a cycle of an SM\n%s", table.text().c_str());
}

void reduce(const DeviceInfo& info) {
  Table table({"sums in memory", "1 warpgroup", "2", "3"});
  for (const bool registers : {false, true}) {
    std::vector<std::string> row{registers ? "red.v4 from registers" : "bulk copies of 4 KiB"};
    for (const int warpgroups : {1, 2, 3}) {
      const Micro micro(info, "reduce", warpgroups, registers ? ", .registers = true" : "", warpgroups * 4 * 4096);
      const double bytes = 4096.0 * repeat * 4 * warpgroups * info.num_sms;
      row.push_back(format("%.0f GB/s", bytes / micro.seconds() / 1e9));
    }
    table.add(row);
  }
  std::printf("\nmicro/reduce: additions to 16 MiB that all SMs share\n%s", table.text().c_str());
}

void handoff(const DeviceInfo& info) {
  Table table({"from one warpgroup to another", "cycles"});
  for (const bool named : {true, false}) {
    const Micro micro(info, "handoff", 2, named ? ", .named = true" : "", 16);
    table.add({named ? "named barrier" : "mbarrier", format("%.0f", micro.cycles() / (2 * repeat))});
  }
  std::printf("\nmicro/handoff: from one warpgroup to the other\n%s", table.text().c_str());
}

struct MicroSet {
  std::string_view name;
  void (*run)(const DeviceInfo&);
};
constexpr MicroSet sets[] = {
    {"micro/wgmma", wgmma}, {"micro/exp2", exp2}, {"micro/reduce", reduce}, {"micro/handoff", handoff}};

}  // namespace

int bench_micro(std::string_view set, const DeviceInfo& info) {
  std::puts(describe(info).c_str());
  bool found = false;
  std::string names = "micro";
  for (const MicroSet& one : sets) {
    names += ", " + std::string(one.name);
    if (set != "micro" && set != one.name) continue;
    one.run(info);
    found = true;
  }
  if (!found) throw Error(ErrorCode::invalid_argument, "bench: got '" + std::string(set) + "', allowed: " + names);
  return ok;
}

}  // namespace flash_attention::cli
