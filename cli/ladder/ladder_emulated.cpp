#include "cli/ladder/ladder_emulated.h"

#include <algorithm>
#include <cstdio>

#include "cli/ladder/ladder_page.h"
#include "cli/output/format.h"
#include "cli/output/report.h"
#include "cli/output/terminal.h"
#include "cli/problem/problem_flags.h"
#include "cli/verb.h"

namespace flash_attention::cli {
namespace {

Problem small_problem(const Arguments& arguments) {
  Problem problem = ladder_problem(arguments.on("causal"));
  problem.batch = problem.heads_q = problem.heads_kv = 1;
  problem.seq_q = problem.seq_kv = arguments.integer("seq", 1, 1 << 20);
  problem.head_dim = problem.head_dim_v = arguments.integer("head-dim", 8, 128);
  return problem;
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
               format("%.1f", global_bytes(c) / min_bytes(m.problem, m.pass)), format("%.2e", counted),
               format("%.2f", counted / flops(m.problem, m.pass)), speed_cell(recorded.tflops(m.kernel, false)),
               speed_cell(recorded.tflops(m.kernel, true))});
  }
  std::printf("%s, in the emulator\n\n%s\n", describe(done.front().problem).c_str(), table.text().c_str());
  std::puts(
      "bank passes: over shared memory, for each that is needed without a bank conflict. global bytes: sectors asked\n"
      "for, caches not counted, beside Q, K, V and O once. FLOPs: counted, beside the formula. The last two columns were\n"
      "recorded: batch 4, 16 heads, 4096 x 4096, head_dim 128, bfloat16.\n");
}

Json counted_to_json(const std::vector<Measurement>& done, const LadderResults& recorded) {
  Json results = Json::array();
  for (const Measurement& m : done) {
    Json entry = to_json(m);
    entry.add("min_bytes", min_bytes(m.problem, m.pass)).add("recorded_full_tflops", recorded.tflops(m.kernel, false));
    results.push(entry.add("recorded_causal_tflops", recorded.tflops(m.kernel, true)));
  }
  Json json = Json::object();
  return json.add("recorded_on", recorded.device).add("results", results);
}

}  // namespace

int climb_emulated(const std::vector<Rung>& rungs, const Arguments& arguments) {
  Progress progress;
  Options options;
  options.device = {.kind = DeviceKind::emulator, .emulated_arch = 90};
  const Problem problem = small_problem(arguments);
  Workload work = make_workload(problem, options, true);
  run_forward(work);
  Workload narrow = make_workload(in_8_bits(problem), options, false);
  std::vector<Measurement> done;
  for (std::size_t r = 0; r < rungs.size() && !interrupted(); ++r) {
    progress.show(format("rung %zu of %zu: %s", r + 1, rungs.size(), rungs[r].name.c_str()));
    Workload& used = rungs[r].narrow ? narrow : work;
    used.options.kernel = rungs[r].kernel;
    done.push_back(measure(used, rungs[r].pass, {}));
  }
  progress.clear();
  if (done.empty()) return interrupted_by_user;
  if (arguments.on("json")) {
    std::puts(counted_to_json(done, recorded_results()).text().c_str());
  } else {
    print_emulated(done, recorded_results());
    for (const Rung& rung : rungs) std::printf("%-16s %s\n", rung.name.c_str(), rung.idea.c_str());
  }
  if (interrupted()) return interrupted_by_user;
  return std::all_of(done.begin(), done.end(), [](const Measurement& m) { return m.ok(); }) ? ok : check_failed;
}

}  // namespace flash_attention::cli
