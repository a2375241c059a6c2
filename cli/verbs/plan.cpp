#include <cstdio>

#include "cli/output/format.h"
#include "cli/output/json.h"
#include "cli/output/report.h"
#include "cli/output/terminal.h"
#include "cli/problem/problem_flags.h"
#include "cli/verb.h"
#include "flash_attention/runtime.h"

namespace flash_attention::cli {
namespace {

/// With --arch a GPU that need not be here.
bool is_typical_gpu(const Arguments& arguments) {
  return arguments.given("arch") && arguments.text("device").starts_with("cuda");
}

DeviceInfo device_to_plan_for(const Arguments& arguments) {
  return is_typical_gpu(arguments) ? typical_gpu(arch_from(arguments.text("arch"))) : device_info(device_from(arguments));
}

std::string describe_device(const Arguments& arguments, const DeviceInfo& info) {
  if (!is_typical_gpu(arguments)) return describe(info);
  return format("a GPU like the %s, sm_%d, %d SMs; whether one is here does not matter", info.name.c_str(), info.arch,
                info.num_sms);
}

Json plan_to_json(const Plan& plan) {
  Json launches = Json::array();
  for (const Launch& launch : plan.launches) {
    Json grid = Json::array();
    for (const int size : launch.grid) grid.push(size);
    Json entry = Json::object();
    entry.add("unit", launch.unit).add("entry", launch.entry).add("config", to_source(launch.config)).add("grid", grid);
    entry.add("block", launch.block).add("cluster", launch.cluster).add("shared_bytes", launch.shared_bytes);
    launches.push(entry);
  }
  Json candidates = Json::array();
  for (const Candidate& candidate : plan.candidates) {
    Json entry = Json::object();
    candidates.push(entry.add("kernel", candidate.kernel).add("rejected_because", candidate.reason));
  }
  Json json = Json::object();
  json.add("kernel", plan.kernel)
      .add("pass", to_string(plan.pass))
      .add("block_q", plan.block_q)
      .add("block_kv", plan.block_kv);
  json.add("num_splits", plan.num_splits).add("workspace_bytes", plan.workspace_bytes);
  json.add("unproven", plan.unproven);
  if (!plan.tuned.empty()) json.add("tuned", plan.tuned);
  return json.add("launches", launches).add("candidates", candidates);
}

int list_kernels(bool as_json) {
  Json json = Json::array();
  Table table({"kernel", "pass", "device", "run on", "takes"});
  for (const KernelSummary& kernel : kernels()) {
    Json entry = Json::object();
    entry.add("kernel", kernel.name).add("pass", to_string(kernel.pass)).add("device", to_string(kernel.device));
    Json proven = Json::array();
    std::string run_on;
    for (const int arch : kernel.proven) {
      proven.push(arch);
      run_on += (run_on.empty() ? "sm_" : ", sm_") + std::to_string(arch);
    }
    json.push(entry.add("proven", proven).add("requirements", kernel.requirements));
    table.add({kernel.name, std::string(to_string(kernel.pass)), std::string(to_string(kernel.device)), run_on,
               kernel.requirements});
  }
  std::puts(as_json ? json.text().c_str() : table.text().c_str());
  return ok;
}

int plan(const Arguments& arguments) {
  if (arguments.on("list")) return list_kernels(arguments.on("json"));
  const Problem problem = problem_from(arguments);
  const DeviceInfo info = device_to_plan_for(arguments);
  Pass pass = pass_from(arguments);
  if (arguments.on("standard")) pass = pass == Pass::backward ? Pass::standard_backward : Pass::standard_forward;
  const auto [kernel, tile] = kernel_from(arguments);
  const Plan made = make_plan(problem, pass, info, kernel, tile);
  if (arguments.on("json")) {
    Json json = Json::object();
    json.add("problem", to_json(problem)).add("device", to_json(info)).add("plan", plan_to_json(made));
    std::puts(json.text().c_str());
    return ok;
  }
  std::printf("problem  %s\ndevice   %s\n\n%s\n", describe(problem).c_str(), describe_device(arguments, info).c_str(),
              to_string(made).c_str());
  if (device_traits(info.device).streams) std::printf("\nsm_%d gets %s\n", info.arch, describe_path(info).c_str());
  if (made.unproven)
    std::printf("%s was never run on sm_%d: a self-test at its first use on such a GPU decides\n", made.kernel.c_str(), info.arch);
  std::puts("\nConsidered, in this order:");
  for (const Candidate& candidate : made.candidates) {
    std::printf("  %-22s %s\n", candidate.kernel.c_str(), candidate.reason.empty() ? "chosen" : candidate.reason.c_str());
  }
  return ok;
}

}  // namespace

const Verb plan_verb{
    "plan",
    "which kernel a problem would get, and why each faster one was not chosen",
    "Planning runs nothing and needs no GPU: --device cuda --arch sm_90 plans for a GPU that is not present.\n"
    "\n"
    "Examples:\n"
    "  flash-attention plan --seq-q 4096 --causal --dtype bf16 --device cuda --arch sm_90\n"
    "  flash-attention plan --backward --head-dim 256\n"
    "  flash-attention plan --list                        every kernel and the problems that it supports\n",
    0,
    problem_flags() + std::vector<Flag>{{"backward", "", "plan the backward pass"},
                                        {"tangent", "", "plan forward mode: out, lse and their tangents"},
                                        {"second", "", "plan the second derivatives"},
                                        {"standard", "", "plan the textbook algorithm"},
                                        {"list", "", "list the kernels instead"},
                                        {"json", "", "print JSON"}},
    plan};

}  // namespace flash_attention::cli
