#include <cstdio>
#include <optional>

#include "cli/output/format.h"
#include "cli/output/report.h"
#include "cli/output/terminal.h"
#include "cli/problem/cases.h"
#include "cli/problem/problem_flags.h"
#include "cli/verb.h"
#include "cli/verbs/micro.h"
#include "cpu/peaks.h"
#include "flash_attention/version.h"

namespace flash_attention::cli {
namespace {

std::vector<Case> chosen_cases(const Arguments& arguments, Device device) {
  const std::string chosen = arguments.words().empty() ? "lengths" : arguments.words().front();
  if (chosen != "all") return make_cases(chosen, device, arguments);
  std::vector<Case> cases;
  for (const CaseSet& set : case_sets()) {
    const std::vector<Case> more = make_cases(set.name, device, arguments);
    cases.insert(cases.end(), more.begin(), more.end());
  }
  return cases;
}

/// How much of what the CPU could do at most was reached: of a plain loop over K and V when decoding, else of the FMA peak.
double fraction_of_peak(const Measurement& m, const cpu::Peaks& peaks) {
  return is_decoding(m.problem) ? m.of_plain_read : m.flops_per_second() / peaks.flops;
}

std::vector<std::string> row(const Measurement& m, const std::optional<cpu::Peaks>& peaks) {
  const std::string speed = m.timing.samples == 0    ? "-"
                            : is_decoding(m.problem) ? format("%.1f GB/s", m.kv_bytes_per_second() / 1e9)
                                                     : format_flops(m.flops_per_second());
  return {describe(m.problem),
          std::string(to_string(m.pass)),
          m.kernel,
          m.timing.samples == 0 ? "-" : format_seconds(m.timing.median_s),
          speed,
          peaks ? format("%.0f %%", 100 * fraction_of_peak(m, *peaks)) : "-",
          m.peak_extra_bytes >= 0 ? format_growth(m.extra_bytes()) : format_bytes(m.extra_bytes()),
          m.repaired_tiles >= 0 ? std::to_string(m.repaired_tiles) : "-",
          describe(m.accuracy)};
}

Json report(const DeviceInfo& info, const std::optional<cpu::Peaks>& peaks, const Json& results, bool complete) {
  Json json = Json::object();
  json.add("version", FLASH_ATTENTION_VERSION).add("device", to_json(info)).add("complete", complete);
  if (peaks) {
    Json measured = Json::object();
    json.add("peaks", measured.add("flops_per_second", peaks->flops).add("read_bytes_per_second", peaks->read_bytes));
  }
  return json.add("results", results);
}

int bench(const Arguments& arguments) {
  Options options;
  options.device = device_from(arguments);
  const DeviceTraits& traits = device_traits(options.device);
  if (traits.emulated) {
    throw Error(ErrorCode::invalid_argument,
                "--device: got emulator, allowed: cpu, cuda (an emulated GPU has no speed; `run` counts its work)");
  }
  if (!arguments.words().empty() && arguments.words().front().starts_with("micro")) {
    return bench_micro(arguments.words().front(), device_info(options.device));
  }
  const KernelChoice choice = kernel_from(arguments);
  options.kernel = choice.name, options.tile = choice.tile;
  const DeviceInfo info = device_info(options.device);
  const std::vector<Case> cases = chosen_cases(arguments, options.device);
  MeasureLimits limits;
  limits.seconds = arguments.number("seconds", 0);
  limits.check = !arguments.on("no-check");

  Progress progress;
  std::optional<cpu::Peaks> peaks;
  if (!traits.gpu_kernels) {
    progress.show("measuring the FMA peak and the read bandwidth ...");
    peaks = cpu::measure_peaks(info.threads);
  }
  Json results = Json::array();
  Table table({"problem", "pass", "kernel", "time", "speed", "of peak", "extra memory", "repaired", "error"});
  bool all_ok = true;
  const auto keep = [&](bool complete) {  // after every case, so that nothing measured is lost, whatever happens
    if (arguments.given("save")) save(arguments.text("save"), report(info, peaks, results, complete).text());
  };
  keep(false);
  for (std::size_t n = 0; n < cases.size() && !interrupted(); ++n) {
    progress.show(format("%zu of %zu: %s", n + 1, cases.size(), describe(cases[n].problem).c_str()));
    const Measurement m = measure(cases[n].problem, cases[n].pass, options, limits);
    all_ok = all_ok && m.ok();
    table.add(row(m, peaks));
    Json result = to_json(m).add("set", cases[n].set);
    if (peaks) result.add("fraction_of_peak", fraction_of_peak(m, *peaks));
    results.push(result);
    keep(false);
  }
  progress.clear();
  keep(!interrupted());
  if (arguments.on("json")) {
    std::puts(report(info, peaks, results, !interrupted()).text().c_str());
  } else {
    std::puts(describe(info).c_str());
    if (peaks) {
      const std::string fma = format_flops(peaks->flops);
      std::printf("peaks measured now: FMA %s, reading %.1f GB/s\n", fma.c_str(), peaks->read_bytes / 1e9);
    }
    std::printf("\n%s", table.text().c_str());
  }
  if (interrupted()) return interrupted_by_user;
  return all_ok ? ok : check_failed;
}

}  // namespace

const Verb bench_verb{
    "bench",
    "measures sets of problems: flash against standard attention, the forward and backward grids, decoding",
    "flash-attention bench [SET]: lengths (the default), lengths-backward, forward, backward, decode, decode-40,\n"
    "small, or all (which leaves out decode-40, the forty shapes of bench/benchmark_decode.py).\n"
    "flash-attention bench micro, or micro/wgmma, micro/exp2, micro/reduce, micro/handoff: the speed of each unit of a\n"
    "Hopper GPU alone (docs/lab/forward_sm90.md draws the conclusions).\n"
    "The numbers of a set may be replaced: --dtype bf16, --head-dim 128, --causal, --seq-q 2048 and so on.\n"
    "Every case is compared with fp64 before it is timed; time is the median, after a warm-up. FLOPs are\n"
    "4 * batch * heads * seq_q * seq_kv * head_dim, halved for causal, 2.5 times that for backward. Extra memory is the\n"
    "memory of a call beyond inputs and results: on the CPU the measured growth of the process, on a GPU the workspace.\n"
    "Repaired tiles are those that forward/sm90 had to do again with the running maximum (docs/numerics.md).\n"
    "On the CPU the same run measures the FMA peak, and each speed is also given as a part of it. Decoding is given as a\n"
    "part of the speed of a plain loop over the same K and V, measured alternately, both with empty caches.\n"
    "Ctrl-C stops and prints the results so far; --save writes every case as soon as it is measured.\n"
    "\n"
    "Examples:\n"
    "  flash-attention bench\n"
    "  flash-attention bench forward --dtype fp32 --device cpu\n"
    "  flash-attention bench decode --json\n",
    1,
    problem_flags() + std::vector<Flag>{{"seconds", "S", "time to spend on each case", "0.5"},
                                        {"no-check", "", "do not compare with fp64"},
                                        {"save", "FILE", "also write the JSON to a file"},
                                        {"json", "", "print JSON instead of the table"}},
    bench};

}  // namespace flash_attention::cli
