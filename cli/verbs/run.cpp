#include <cstdio>

#include "cli/output/format.h"
#include "cli/output/report.h"
#include "cli/output/terminal.h"
#include "cli/problem/problem_flags.h"
#include "cli/verb.h"

namespace flash_attention::cli {
namespace {

void print(const Measurement& m, const DeviceInfo& info, const Plan& plan) {
  std::printf("problem  %s\n", describe(m.problem).c_str());
  std::printf("device   %s\n", describe(info).c_str());
  std::printf("kernel   %s, %s, tiles of %d x %d, %d split%s\n", m.kernel.c_str(), std::string(to_string(m.pass)).c_str(),
              plan.block_q, plan.block_kv, plan.num_splits, plan.num_splits == 1 ? "" : "s");
  if (m.timing.samples > 0) {
    std::printf("time     %s, median of %d (%s to %s)\n", format_seconds(m.timing.median_s).c_str(), m.timing.samples,
                format_seconds(m.timing.low_s).c_str(), format_seconds(m.timing.high_s).c_str());
    std::printf("speed    %s", format_flops(m.flops_per_second()).c_str());
    std::puts(is_decoding(m.problem) ? format(", K and V at %.1f GB/s", m.kv_bytes_per_second() / 1e9).c_str() : "");
  }
  if (m.counters) std::printf("emulated, so there is no time; what the kernels did:\n%s\n", to_string(*m.counters).c_str());
  std::printf("memory   workspace %s", format_bytes(static_cast<double>(m.workspace_bytes)).c_str());
  if (m.peak_extra_bytes >= 0)
    std::printf(", peak extra %s", format_growth(static_cast<double>(m.peak_extra_bytes)).c_str());
  const auto scores =
      static_cast<double>(m.problem.batch * m.problem.heads_q * m.problem.seq_q) * static_cast<double>(m.problem.seq_kv);
  std::printf(" (the score matrix would take %s)\n",
              format_bytes(scores * static_cast<double>(size_of(m.problem.dtype))).c_str());
  if (m.repaired_tiles > 0) std::printf("repairs  %lld tiles done again\n", static_cast<long long>(m.repaired_tiles));
  for (const Accuracy& a : m.accuracy) {
    std::printf("error    %-4s max %.2e, relative rms %.2e (allowed %.1e), %lld of %lld rows against fp64: %s\n",
                a.tensor.c_str(), a.max_error, a.relative_rms, a.allowed, static_cast<long long>(a.rows),
                static_cast<long long>(a.of_rows), a.ok() ? "ok" : "WRONG");
  }
}

int run(const Arguments& arguments) {
  const Problem problem = problem_from(arguments);
  Options options;
  options.device = device_from(arguments);
  const KernelChoice choice = kernel_from(arguments);
  options.kernel = choice.name, options.tile = choice.tile;
  options.seed = static_cast<std::uint64_t>(arguments.integer("seed", 0));
  Pass pass = pass_from(arguments);
  if (arguments.on("standard")) pass = pass == Pass::backward ? Pass::standard_backward : Pass::standard_forward;
  const DeviceInfo info = device_info(options.device);
  const Plan plan = make_plan(problem, pass, info, options.kernel, options.tile);

  Progress progress;
  progress.show("running " + plan.kernel + " ...");
  MeasureLimits limits;
  limits.check = !arguments.on("no-check");
  const Measurement measurement = measure(problem, pass, options, limits);
  progress.clear();

  if (arguments.on("json")) {
    std::puts(to_json(measurement).add("device_info", to_json(info)).text().c_str());
  } else {
    print(measurement, info, plan);
  }
  if (!measurement.ok()) return check_failed;
  return interrupted() ? interrupted_by_user : ok;
}

}  // namespace

const Verb run_verb{
    "run",
    "one problem on one device: kernel, time, speed, memory, error against fp64",
    "Fills q, k and v with random numbers, calls the library once to warm up, compares a sample of the result's rows\n"
    "with the same attention computed in fp64, then times it. --backward measures the gradients instead.\n"
    "On the emulator it prints counters of the kernel's work and no time, since an emulated GPU has no speed.\n"
    "\n"
    "Examples:\n"
    "  flash-attention run --seq-q 4096 --causal --dtype bf16\n"
    "  flash-attention run --heads 32 --kv-heads 8 --seq-q 1 --seq-kv 32768           decoding with grouped heads\n"
    "  flash-attention run --seq-q 2048 --backward --window 256,0\n"
    "  flash-attention run --seq-q 4096 --key-indices 512                             keys that each query chooses\n"
    "  flash-attention run --device emulator --arch sm_80 --seq-q 64 --heads 1 --dtype fp16        counts what the kernel "
    "does\n"
    "\n"
    "Exits with 1 if the error is larger than allowed.\n",
    0,
    problem_flags() + std::vector<Flag>{{"backward", "", "measure the backward pass"},
                                        {"tangent", "", "measure forward mode: out, lse and their tangents; out and lse are checked"},
                                        {"second", "", "measure the second derivatives, unchecked"},
                                        {"standard", "", "the textbook algorithm, which stores the score matrix"},
                                        {"seed", "N", "seed of the dropout mask", "0"},
                                        {"no-check", "", "do not compare with fp64"},
                                        {"json", "", "print JSON"}},
    run};

}  // namespace flash_attention::cli
