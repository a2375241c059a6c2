#include "cli/ladder/ladder_gpu.h"

#include <algorithm>
#include <cctype>
#include <cstdio>
#include <filesystem>
#include <functional>

#include "cli/ladder/ladder_page.h"
#include "cli/output/format.h"
#include "cli/output/report.h"
#include "cli/output/terminal.h"
#include "cli/problem/problem_flags.h"
#include "cli/verb.h"

namespace flash_attention::cli {
namespace {

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

/// Times one rung; `work` is the problem, or the same in 8 bits. Of problems that are not the table's, a call that is known
/// to take long is timed once, or not at all.
LadderRow time_rung(Workload& work, const Problem& problem, const Rung& rung, const LadderResults& known,
                    MeasureLimits limits, std::vector<Accuracy>& accuracy) {
  LadderRow row;
  row.kernel = rung.kernel;
  row.problem = problem;
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
    LadderRow timed = to_row(m);
    timed.problem = problem;
    return timed;
  } catch (const Error& error) {
    row.reason = error.what();
    return row;
  }
}

/// "NVIDIA H200" keeps its results in h200.
std::string folder_of(std::string device) {
  constexpr std::string_view maker = "NVIDIA ";
  if (device.starts_with(maker)) device.erase(0, maker.size());
  for (char& c : device) c = std::isalnum(static_cast<unsigned char>(c)) ? static_cast<char>(std::tolower(c)) : '_';
  return device;
}

/// Calls keep() after every row, so that nothing measured is lost.
void time_all(const std::vector<Rung>& rungs, Device device, bool sweep, double seconds, LadderResults& results,
              std::vector<std::vector<Accuracy>>& accuracy, const std::function<void()>& keep) {
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
    Workload narrow = make_workload(in_8_bits(problems[n]), options, false);
    for (std::size_t r = 0; r < rungs.size() && !interrupted(); ++r) {
      if (!in_table && is_backward(rungs[r].pass)) continue;
      progress.show(format("problem %zu of %zu, rung %zu of %zu: %s", n + 1, problems.size(), r + 1, rungs.size(),
                           rungs[r].name.c_str()));
      const MeasureLimits limits{.seconds = seconds, .max_samples = 50, .min_samples = 1, .check = in_table};
      std::vector<Accuracy> found;
      results.rows.push_back(time_rung(rungs[r].narrow ? narrow : work, problems[n], rungs[r], results, limits, found));
      accuracy[r].insert(accuracy[r].end(), found.begin(), found.end());
      keep();
    }
  }
}

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

}  // namespace

int climb_on_gpu(const std::vector<Rung>& rungs, const DeviceInfo& info, const Arguments& arguments) {
  LadderResults results;
  results.device = info.name;
  std::vector<std::vector<Accuracy>> accuracy(rungs.size());
  const bool update = arguments.on("update");
  const auto keep = [&] {
    if (arguments.given("save")) save(arguments.text("save"), to_json(results, info).text());
  };
  time_all(rungs, info.device, update || arguments.on("sweep"), arguments.number("seconds", 0), results, accuracy, keep);
  const std::string text = to_json(results, info).text();
  if (update && !interrupted()) {
    const std::filesystem::path root = arguments.text("root"), folder = root / "bench/results" / folder_of(info.name);
    const std::filesystem::path file = folder / "ladder.json";
    std::filesystem::create_directories(folder);
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

}  // namespace flash_attention::cli
