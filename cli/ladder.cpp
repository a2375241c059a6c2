#include <algorithm>
#include <cstdio>
#include <filesystem>
#include <fstream>
#include <optional>
#include <sstream>

#include "cli/format.h"
#include "cli/ladder_cpu.h"
#include "cli/ladder_page.h"
#include "cli/problem_flags.h"
#include "cli/report.h"
#include "cli/terminal.h"
#include "cli/verb.h"

namespace flash_attention::cli {
namespace {

constexpr std::size_t context = 3;  // lines around a change

int show_diff(const std::vector<std::string>& words) {
  if (words.size() != 2) {
    throw Error(ErrorCode::invalid_argument, "--diff: got " + std::to_string(words.size()) +
                                                 " rungs, allowed: two, such as flash-attention ladder --diff 06 07");
  }
  const std::vector<Rung> pair = rungs_named(words);
  const std::vector<DiffLine> lines = diff(pair[0].source, pair[1].source);
  std::printf("--- %s\n+++ %s\n", pair[0].file.c_str(), pair[1].file.c_str());
  std::size_t next = 0;  // the first line that is not printed yet
  for (std::size_t i = 0; i < lines.size(); ++i) {
    if (lines[i].mark == ' ') continue;
    const std::size_t from = std::max(next, i - std::min(i, context));
    if (from > next || next == 0) std::puts("@@");
    std::size_t end = i + 1;
    for (std::size_t calm = 0; end < lines.size() && calm < context; ++end) calm = lines[end].mark == ' ' ? calm + 1 : 0;
    for (next = from; next < end; ++next) {
      std::printf("%c%.*s\n", lines[next].mark, static_cast<int>(lines[next].text.size()), lines[next].text.data());
    }
    i = end - 1;
  }
  return ok;
}

// On a GPU ------------------------------------------------------------------------------------------------------------

/// The problems of the scalability plots: as many tokens at every length, and the heads of GPT-3.
std::vector<Problem> sweep_problems() {
  std::vector<Problem> problems;
  for (std::int64_t length = 512; length <= 16384; length *= 2) {
    Problem problem = ladder_problem(false);
    problem.batch = 16384 / length;
    problem.seq_q = problem.seq_kv = length;
    if (problem != ladder_problem(false)) problems.push_back(problem);
  }
  for (std::int64_t length = 512; length <= 8192; length *= 2) {
    Problem problem = ladder_problem(true);
    problem.batch = 1;
    problem.heads_q = problem.heads_kv = 96;
    problem.seq_q = problem.seq_kv = length;
    problems.push_back(problem);
  }
  return problems;
}

constexpr double patience = 0.6, long_call = 0.1;  // seconds

/// Times one rung. Beside the table's own problems, a call that is known to take long is timed once, or not at all.
LadderRow time_rung(Workload& work, const Rung& rung, const LadderResults& known, MeasureLimits limits,
                    std::vector<Accuracy>& accuracy) {
  LadderRow row;
  row.kernel = rung.kernel;
  row.problem = work.problem;
  row.pass = rung.pass;
  const double speed = known.tflops(rung.kernel, work.problem.causal) * 1e12;
  const double expected = speed > 0 ? flops(work.problem, rung.pass) / speed : 0;
  if (expected > patience) {
    row.reason = "would take " + format_seconds(expected);
    return row;
  }
  if (expected > long_call) limits.max_samples = 1;
  try {
    work.options.kernel = rung.kernel;
    const Measurement m = measure(work, rung.pass, limits);
    accuracy = m.accuracy;
    return to_row(m);
  } catch (const Error& error) {
    row.reason = error.what();
    return row;
  }
}

void time_all(const std::vector<Rung>& rungs, Device device, bool sweep, double seconds, LadderResults& results,
              std::vector<std::vector<Accuracy>>& accuracy) {
  std::vector<Problem> problems{ladder_problem(false), ladder_problem(true)};
  if (sweep) {
    const std::vector<Problem> more = sweep_problems();
    problems.insert(problems.end(), more.begin(), more.end());
  }
  Progress progress;
  Options options;
  options.device = device;
  for (std::size_t n = 0; n < problems.size(); ++n) {
    const bool in_table = n < 2;
    Workload work = make_workload(problems[n], options, in_table);
    if (in_table) run_forward(work);
    for (std::size_t r = 0; r < rungs.size() && !interrupted(); ++r) {
      if (!in_table && is_backward(rungs[r].pass)) continue;
      progress.show(format("problem %zu of %zu, rung %zu of %zu: %s", n + 1, problems.size(), r + 1, rungs.size(),
                           rungs[r].name.c_str()));
      const MeasureLimits limits{.seconds = seconds, .max_samples = 50, .check = in_table};
      std::vector<Accuracy> found;
      results.rows.push_back(time_rung(work, rungs[r], results, limits, found));
      accuracy[r].insert(accuracy[r].end(), found.begin(), found.end());
    }
  }
}

std::string speed_cell(double tflops) { return tflops == 0 ? "-" : format(tflops < 10 ? "%.2f" : "%.1f", tflops); }

void print_timed(const std::vector<Rung>& rungs, const LadderResults& results,
                 const std::vector<std::vector<Accuracy>>& accuracy) {
  Table table({"rung", "full TFLOP/s", "causal TFLOP/s", "x before", "error"});
  double before = 0;
  for (std::size_t r = 0; r < rungs.size(); ++r) {
    const double full = results.tflops(rungs[r].kernel, false), causal = results.tflops(rungs[r].kernel, true);
    if (r > 0 && rungs[r].pass != rungs[r - 1].pass) before = 0;
    const std::string ratio = before > 0 && full > 0 ? format("%.2f", full / before) : "-";
    table.add({rungs[r].name, speed_cell(full), speed_cell(causal), ratio, describe(accuracy[r])});
    before = full;
  }
  std::printf("%s\n\n%s", describe(ladder_problem(false)).c_str(), table.text().c_str());
}

// In the emulator -----------------------------------------------------------------------------------------------------

Problem small_problem(const Arguments& arguments) {
  Problem problem = ladder_problem(arguments.on("causal"));
  problem.batch = problem.heads_q = problem.heads_kv = 1;
  problem.seq_q = problem.seq_kv = arguments.integer("seq", 1, 1 << 20);
  problem.head_dim = problem.head_dim_v = arguments.integer("head-dim", 8, 128);
  return problem;
}

/// Q, K, V and O once; for backward also dO, dQ, dK and dV.
double least_bytes(const Problem& p, Pass pass) {
  const double rows = static_cast<double>(p.batch * (p.seq_q * p.heads_q + p.seq_kv * p.heads_kv)) * 2;
  return rows * static_cast<double>(p.head_dim) * static_cast<double>(size_of(p.dtype)) * (is_backward(pass) ? 2 : 1);
}

double global_bytes(const emulator::Counters& c) {
  return 32 * static_cast<double>(c.global_sectors) + static_cast<double>(c.bulk_bytes);
}

std::string conflicts(const emulator::Counters& c) {
  if (c.shared_wavefronts_ideal == 0) return "-";
  return format("%.2f", static_cast<double>(c.shared_wavefronts) / static_cast<double>(c.shared_wavefronts_ideal));
}

void print_emulated(const std::vector<Measurement>& done, const LadderResults& recorded) {
  Table table({"rung", "error", "bank passes", "global bytes", "x least", "FLOPs", "x formula",
               recorded.rows.empty() ? "H200" : recorded.device + " TFLOP/s", "causal"});
  for (const Measurement& m : done) {
    const emulator::Counters& c = *m.counters;
    const auto counted = static_cast<double>(c.fma_flops + c.mma_flops + c.wgmma_flops);
    table.add({m.kernel.substr(m.kernel.find('/') + 1), describe(m.accuracy), conflicts(c), format_bytes(global_bytes(c)),
               format("%.1f", global_bytes(c) / least_bytes(m.problem, m.pass)), format("%.2e", counted),
               format("%.2f", counted / flops(m.problem, m.pass)), speed_cell(recorded.tflops(m.kernel, false)),
               speed_cell(recorded.tflops(m.kernel, true))});
  }
  std::printf("%s, in the emulator\n\n%s\n", describe(done.front().problem).c_str(), table.text().c_str());
  std::puts(
      "bank passes: over shared memory, for each that is needed without a bank conflict. global bytes: sectors asked\n"
      "for, caches not counted, beside Q, K, V and O once. FLOPs: counted, beside the formula. The last two columns were\n"
      "recorded: batch 4, 16 heads, 4096 x 4096, head_dim 128, bfloat16.\n");
}

Json to_json(const std::vector<Measurement>& done, const LadderResults& recorded) {
  Json results = Json::array();
  for (const Measurement& m : done) {
    Json entry = to_json(m);
    entry.add("least_bytes", least_bytes(m.problem, m.pass)).add("recorded_full_tflops", recorded.tflops(m.kernel, false));
    results.push(entry.add("recorded_causal_tflops", recorded.tflops(m.kernel, true)));
  }
  Json json = Json::object();
  return json.add("recorded_on", recorded.device).add("results", results);
}

int climb_emulated(const std::vector<Rung>& rungs, const Problem& problem, bool as_json) {
  Progress progress;
  Options options;
  options.device = {.kind = DeviceKind::emulator, .emulated_arch = 90};
  Workload work = make_workload(problem, options, true);
  run_forward(work);
  std::vector<Measurement> done;
  for (std::size_t r = 0; r < rungs.size() && !interrupted(); ++r) {
    progress.show(format("rung %zu of %zu: %s", r + 1, rungs.size(), rungs[r].name.c_str()));
    work.options.kernel = rungs[r].kernel;
    done.push_back(measure(work, rungs[r].pass, {}));
  }
  progress.clear();
  if (done.empty()) return interrupted_by_user;
  if (as_json) {
    std::puts(to_json(done, recorded_results()).text().c_str());
  } else {
    print_emulated(done, recorded_results());
    for (const Rung& rung : rungs) std::printf("%-16s %s\n", rung.name.c_str(), rung.idea.c_str());
  }
  if (interrupted()) return interrupted_by_user;
  return std::all_of(done.begin(), done.end(), [](const Measurement& m) { return m.ok(); }) ? ok : check_failed;
}

// -----------------------------------------------------------------------------------------------------------------------

int climb_timed(const std::vector<Rung>& rungs, const DeviceInfo& info, const Arguments& arguments) {
  LadderResults results;
  results.device = info.name;
  std::vector<std::vector<Accuracy>> accuracy(rungs.size());
  const bool update = arguments.on("update");
  time_all(rungs, info.device, update || arguments.on("sweep"), arguments.number("seconds"), results, accuracy);
  const std::string text = to_json(results, info).text();
  if (arguments.given("save")) save(arguments.text("save"), text);
  if (update && !interrupted()) {
    const std::filesystem::path root = arguments.text("root"), file = root / "bench/results/h200/ladder.json";
    save(file.string(), text);
    update_pages(root, file, rungs, results);
  }
  if (arguments.on("json")) {
    std::puts(text.c_str());
  } else {
    print_timed(rungs, results, accuracy);
  }
  if (interrupted()) return interrupted_by_user;
  for (const auto& of_rung : accuracy) {
    if (of_rung.empty() || !std::all_of(of_rung.begin(), of_rung.end(), [](const Accuracy& a) { return a.ok(); }))
      return check_failed;
  }
  return ok;
}

int ladder(const Arguments& arguments) {
  if (arguments.on("diff")) return show_diff(arguments.words());
  std::vector<Rung> chosen = rungs_named(arguments.words());
  const std::string name = arguments.text("device");
  const bool only_cpu =
      std::all_of(chosen.begin(), chosen.end(), [](const Rung& rung) { return rung.device == DeviceKind::cpu; });
  const DeviceKind kind = name == "cpu" || (name == "best" && only_cpu) ? DeviceKind::cpu : DeviceKind::cuda;
  std::erase_if(chosen, [&](const Rung& rung) { return rung.device != kind; });
  if (chosen.empty()) {
    throw Error(ErrorCode::invalid_argument, "--device: got " + name +
                                                 ", on which none of the named rungs runs; c0 to c3 " +
                                                 "take cpu, the others cuda or emulator");
  }
  if (kind == DeviceKind::cpu) return climb_on_cpu(chosen, arguments);
  const Device best = name == "best" ? best_device() : parse_device(name);
  if (best.kind == DeviceKind::cuda) return climb_timed(chosen, device_info(best), arguments);
  if (arguments.on("update")) {
    const std::filesystem::path root = arguments.text("root"), file = root / "bench/results/h200/ladder.json";
    std::ifstream stream(file);
    std::stringstream content;
    content << stream.rdbuf();
    update_pages(root, file, chosen, results_from(content.str(), file.string()));
    return ok;
  }
  return climb_emulated(chosen, small_problem(arguments), arguments.on("json"));
}

}  // namespace

const Verb ladder_verb{
    "ladder",
    "the teaching ladder: every step from a naive kernel to a fast one, checked and timed",
    "flash-attention ladder [RUNG...]: kernels/ladder/ holds one kernel for each idea, each a small change of the one\n"
    "before. With a GPU every rung is compared with fp64 and timed. Without one every rung runs in the emulator, which\n"
    "counts what it does (bank conflicts, bytes asked of global memory, FLOPs) beside what was measured on an H200.\n"
    "docs/ladder/README.md is the way in; a page for each rung explains its change. --device cpu climbs the ladder of the\n"
    "CPU instead: scalar, blocked online softmax, SIMD, threads.\n"
    "\n"
    "Examples:\n"
    "  flash-attention ladder                       all rungs\n"
    "  flash-attention ladder 06 07                 two of them\n"
    "  flash-attention ladder --diff 06 07          the change that one makes to the other\n"
    "  flash-attention ladder --device emulator --seq 256 --head-dim 128 --causal\n"
    "  flash-attention ladder --device cpu          the four steps on the CPU, and the library's kernel beside them\n"
    "  flash-attention ladder --update              rewrites kernels/ladder/README.md and the plots in "
    "docs/ladder/images;\n"
    "                                               measures first where there is a GPU\n"
    "Any rung is a kernel like every other: flash-attention run --kernel ladder/06_mma --dtype bf16 --head-dim 128\n"
    "\n"
    "Exits with 1 where a rung is wrong.\n",
    32,
    {{"diff", "", "show how the second of two rungs differs from the first"},
     {"device", "D", "cuda, cuda:N, emulator, cpu or best", "best"},
     {"seq", "N", "queries and keys of the emulated problem; 1024 on the CPU", "128"},
     {"head-dim", "N", "its head dimension: a multiple of 8, at most 128", "64"},
     {"causal", "", "with a causal mask (emulator and CPU; a GPU is timed with and without)"},
     {"sweep", "", "GPU: also by length, as in the plots"},
     {"seconds", "S", "GPU and CPU: time to spend on each rung and problem", "0.2"},
     {"update", "", "rewrite the ladder's table and plots"},
     {"root", "FOLDER", "the source that --update writes to", "."},
     {"save", "FILE", "GPU: write what was measured as JSON"},
     {"json", "", "print JSON instead of the table"}},
    ladder};

}  // namespace flash_attention::cli
