#include "cli/ladder/ladder_cpu.h"

#include <algorithm>
#include <cstdio>

#include "cli/measure/measure.h"
#include "cli/output/format.h"
#include "cli/output/report.h"
#include "cli/output/terminal.h"
#include "cli/problem/problem_flags.h"
#include "cli/verb.h"
#include "cpu/peaks.h"

namespace flash_attention::cli {
namespace {

constexpr const char* last_step = "ladder/c3_threads";
constexpr const char* production = "cpu/prefill";

Problem problem_for_cpu(const Arguments& arguments) {
  Problem problem;
  problem.batch = 1;
  problem.heads_q = problem.heads_kv = 4;
  problem.seq_q = problem.seq_kv = arguments.given("seq") ? arguments.integer("seq", 1, 1 << 20) : 1024;
  problem.head_dim = problem.head_dim_v = arguments.integer("head-dim", 8, 128);
  problem.causal = arguments.on("causal");
  return problem;
}

/// The most multiply-adds that the kernel's threads can do.
struct CorePeaks {
  double one = 0, all = 0;

  double of(const std::string& kernel) const { return kernel == last_step || kernel == production ? all : one; }
};

std::string speed(double flops_per_second) { return format("%.1f", flops_per_second / 1e9); }

/// The best of the samples: what the code can do when nothing else runs.
double best_flops(const Measurement& m) { return m.timing.samples ? flops(m.problem, m.pass) / m.timing.low_s : 0; }

void print(const std::vector<Measurement>& done, const DeviceInfo& info, const CorePeaks& peaks) {
  std::printf("problem  %s\n", describe(done.front().problem).c_str());
  std::printf("device   %s\n", describe(info).c_str());
  std::printf("peak     %s of multiply-adds with one thread, %s with %d\n\n", format_flops(peaks.one).c_str(),
              format_flops(peaks.all).c_str(), info.threads);
  Table table({"step", "time", "GFLOP/s", "best", "x before", "of peak", "extra memory", "error"});
  double before = 0;
  for (const Measurement& m : done) {
    const double best = best_flops(m);
    table.add({m.kernel, format_seconds(m.timing.median_s), speed(m.flops_per_second()), speed(best),
               before > 0 ? format("%.2f", best / before) : "-", format("%.0f %%", 100 * best / peaks.of(m.kernel)),
               format_growth(m.extra_bytes()), describe(m.accuracy)});
    before = best;
  }
  std::printf("%s\n", table.text().c_str());
  std::puts(
      "time is the median; best is the speed of the fastest tenth, which 'x before' and 'of peak' compare: of one thread "
      "up\n"
      "to c2_simd, of all from c3_threads on. cpu/prefill is what the library itself would take.\n");
}

Json all_to_json(const std::vector<Measurement>& done, const DeviceInfo& info, const CorePeaks& peaks) {
  Json results = Json::array(), json = Json::object();
  for (const Measurement& m : done) {
    Json entry = to_json(m);
    results.push(entry.add("best_flops_per_second", best_flops(m)).add("peak_flops_per_second", peaks.of(m.kernel)));
  }
  return json.add("device_info", to_json(info)).add("results", results);
}

}  // namespace

int climb_on_cpu(const std::vector<Rung>& steps, const Arguments& arguments) {
  const Problem problem = problem_for_cpu(arguments);
  Options options;
  options.device = {.kind = DeviceKind::cpu};
  const DeviceInfo info = device_info(options.device);
  std::vector<std::string> kernels;
  for (const Rung& step : steps) kernels.push_back(step.kernel);
  kernels.emplace_back(production);

  Progress progress;
  std::vector<Measurement> done;
  for (const std::string& kernel : kernels) {
    if (interrupted()) break;
    progress.show(format("step %zu of %zu: %s", done.size() + 1, kernels.size(), kernel.c_str()));
    options.kernel = kernel;
    done.push_back(measure(problem, Pass::forward, options, {.seconds = arguments.number("seconds", 0)}));
  }
  const CorePeaks peaks{cpu::measure_peaks(1).flops, cpu::measure_peaks(info.threads).flops};
  progress.clear();
  if (done.empty()) return interrupted_by_user;
  if (arguments.on("json")) {
    std::puts(all_to_json(done, info, peaks).text().c_str());
  } else {
    print(done, info, peaks);
    for (const Rung& step : steps) std::printf("%-12s %s\n", step.name.c_str(), step.idea.c_str());
  }
  if (interrupted()) return interrupted_by_user;
  return std::all_of(done.begin(), done.end(), [](const Measurement& m) { return m.ok(); }) ? ok : check_failed;
}

}  // namespace flash_attention::cli
