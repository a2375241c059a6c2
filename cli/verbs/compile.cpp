#include <cstdio>
#include <set>

#include "cli/output/format.h"
#include "cli/output/report.h"
#include "cli/output/terminal.h"
#include "cli/problem/common_problems.h"
#include "cli/problem/problem_flags.h"
#include "cli/verb.h"
#include "flash_attention/runtime.h"

namespace flash_attention::cli {
namespace {

std::vector<CommonCall> calls_from(const Arguments& arguments, const DeviceInfo& info) {
  if (arguments.on("common")) return common_calls(info);
  if (arguments.on("core")) return core_calls(info);
  return {{problem_from(arguments), pass_from(arguments)}};
}

/// The GPU's own architecture, or the one that was requested: no GPU is needed.
DeviceInfo device_to_compile_for(const Arguments& arguments) {
  if (!arguments.given("arch"))
    return device_info(arguments.given("device") ? device_from(arguments) : Device{.kind = DeviceKind::cuda});
  return typical_gpu(arch_from(arguments.text("arch")));
}

int compile(const Arguments& arguments) {
  const DeviceInfo info = device_to_compile_for(arguments);
  if (!device_traits(info.device).streams) {
    throw Error(ErrorCode::invalid_argument,
                "--device: got " + to_string(info.device) + ", allowed: cuda (only GPU kernels are compiled)");
  }
  const KernelChoice choice =
      arguments.words().empty() ? kernel_from(arguments) : kernel_from(arguments, arguments.words().front());
  const std::vector<CommonCall> calls = calls_from(arguments, info);

  Progress progress;
  Json done = Json::array();
  Table table({"kernel", "registers", "spills", "state"});
  std::set<std::string> seen;
  std::size_t number = 0, lost = 0;
  const auto list = [&](const std::vector<KernelReport>& reports) {
    for (const KernelReport& report : reports) {
      if (!seen.insert(report.kernel).second) continue;
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
  };
  for (const auto& [problem, pass] : calls) {
    if (interrupted()) break;
    const Plan plan = make_plan(problem, pass, info, choice.name, choice.tile);
    progress.show(format("%zu of %zu: %s for %s", ++number, calls.size(), plan.kernel.c_str(), describe(problem).c_str()));
    list(flash_attention::compile(plan, info.arch));
  }
  for (const AppendProblem& problem : arguments.on("common") ? common_appends() : std::vector<AppendProblem>{}) {
    if (interrupted()) break;
    progress.show("rows for caches");
    list(flash_attention::compile(problem, info.arch));
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
    "GPU kernels are compiled on first use and kept on disk. This verb compiles them beforehand: for one problem, which\n"
    "the same flags describe as in `run`, or with --common for the problems of most models. It needs NVRTC; with --arch\n"
    "it needs no GPU. To ship kernels: FLASH_ATTENTION_CACHE_DIR=folder flash-attention compile --common --arch sm_90;\n"
    "on the other machine set FLASH_ATTENTION_AOT_DIR to that folder.\n"
    "\n"
    "Examples:\n"
    "  flash-attention compile --common --arch sm_90\n"
    "  flash-attention compile forward/sm90 --head-dim 128 --dtype bf16 --causal\n",
    1,
    problem_flags() +
        std::vector<Flag>{{"backward", "", "compile the backward pass"},
                          {"tangent", "", "compile forward mode"},
                          {"second", "", "compile the second derivatives"},
                          {"common", "", "the problems of most models: usual widths and types, training, packed, decoding"},
                          {"core", "", "a part of --common: 16 bits, head dimensions 64 and 128, full, causal; decoding"},
                          {"json", "", "print JSON"}},
    compile};

}  // namespace flash_attention::cli
