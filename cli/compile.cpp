#include <cstdio>

#include "cli/format.h"
#include "cli/problem_flags.h"
#include "cli/report.h"
#include "cli/terminal.h"
#include "cli/verb.h"
#include "flash_attention/runtime.h"

namespace flash_attention::cli {
namespace {

/// What most models ask for: the usual widths in both 16-bit types, full and causal, training and inference.
std::vector<Problem> common_problems() {
  std::vector<Problem> problems;
  for (const Dtype dtype : {Dtype::float16, Dtype::bfloat16}) {
    for (const std::int64_t head_dim : {64, 128, 256}) {
      for (const bool causal : {false, true}) {
        Problem problem;
        problem.seq_q = problem.seq_kv = 4096;
        problem.heads_q = problem.heads_kv = 16;
        problem.head_dim = problem.head_dim_v = head_dim;
        problem.dtype = dtype;
        problem.causal = causal;
        problems.push_back(problem);
      }
    }
  }
  return problems;
}

/// The GPU's own architecture, or the one that was asked for: no GPU is needed.
DeviceInfo device_to_compile_for(const Arguments& arguments) {
  if (!arguments.given("arch"))
    return device_info(arguments.given("device") ? device_from(arguments) : Device{.kind = DeviceKind::cuda});
  return planning_device(arch_from(arguments.text("arch")));
}

int compile(const Arguments& arguments) {
  const DeviceInfo info = device_to_compile_for(arguments);
  if (info.device.kind != DeviceKind::cuda) {
    throw Error(ErrorCode::invalid_argument,
                "--device: got " + to_string(info.device) + ", allowed: cuda (only GPU kernels are compiled)");
  }
  const std::string kernel = arguments.words().empty() ? arguments.text("kernel") : arguments.words().front();
  const std::vector<Problem> problems = arguments.on("common") ? common_problems() : std::vector{problem_from(arguments)};
  std::vector<Pass> passes{arguments.on("backward") ? Pass::backward : Pass::forward};
  if (arguments.on("common")) passes = {Pass::forward, Pass::backward};

  Progress progress;
  Json done = Json::array();
  Table table({"kernel", "registers", "spills", "state"});
  std::size_t number = 0, lost = 0;
  for (const Problem& problem : problems) {
    for (const Pass pass : passes) {
      if (interrupted()) break;
      const Plan plan = make_plan(problem, pass, info, kernel);
      progress.show(format("%zu of %zu: %s for %s", ++number, problems.size() * passes.size(), plan.kernel.c_str(),
                           describe(problem).c_str()));
      for (const KernelReport& report : flash_attention::compile(plan, info.arch)) {
        Json entry = Json::object();
        entry.add("kernel", report.kernel).add("registers", report.registers).add("spill_bytes", report.spill_bytes);
        done.push(entry.add("path", report.path).add("compiled", report.compiled));
        const bool kept = !report.path.empty();
        table.add({report.kernel.substr(0, report.kernel.find('{')), std::to_string(report.registers),
                   std::to_string(report.spill_bytes),
                   !kept             ? "NOT KEPT"
                   : report.compiled ? "compiled"
                                     : "was there"});
        lost += !kept;
      }
    }
  }
  progress.clear();
  if (arguments.on("json")) {
    std::puts(done.text().c_str());
  } else {
    std::printf("%sin %s\n", table.text().c_str(), cache_directory().c_str());
  }
  if (interrupted()) return interrupted_by_user;
  if (lost == 0) return ok;
  std::fprintf(stderr,
               "flash-attention: %zu kernels could not be kept in %s; `flash-attention doctor` says more, "
               "FLASH_ATTENTION_CACHE_DIR names another folder\n",
               lost, cache_directory().c_str());
  return check_failed;
}

}  // namespace

const Verb compile_verb{
    "compile",
    "compiles kernels ahead of time, so that no call waits for a compiler",
    "GPU kernels are compiled on first use and kept on disk. This makes them beforehand: for one problem, described by "
    "the\n"
    "same flags as `run`, or with --common for what most models ask for. It needs NVRTC; with --arch it needs no GPU.\n"
    "To ship kernels: FLASH_ATTENTION_CACHE_DIR=folder flash-attention compile --common --arch sm_90, then let\n"
    "FLASH_ATTENTION_AOT_DIR point to that folder where they are used.\n"
    "\n"
    "Examples:\n"
    "  flash-attention compile --common --arch sm_90\n"
    "  flash-attention compile forward/sm90 --head-dim 128 --dtype bf16 --causal\n",
    1,
    problem_flags() + std::vector<Flag>{{"backward", "", "compile the backward pass"},
                                        {"common", "", "the usual widths, both 16-bit types, full and causal, both passes"},
                                        {"json", "", "print JSON"}},
    compile};

}  // namespace flash_attention::cli
