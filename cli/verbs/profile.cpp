#include <algorithm>
#include <cstdio>
#include <utility>

#include "cli/measure/hardware_counters.h"
#include "cli/measure/measure.h"
#include "cli/output/format.h"
#include "cli/output/report.h"
#include "cli/problem/mask_flag.h"
#include "cli/problem/problem_flags.h"
#include "cli/verb.h"
#include "cli/verbs/process.h"

namespace flash_attention::cli {
namespace {

/// The pass of a kernel: that of the named kernel, else the pass that --backward chooses.
Pass pass_of(const std::string& kernel, bool backward) {
  for (const KernelSummary& known : kernels()) {
    if (known.name == kernel) return known.pass;
  }
  return backward ? Pass::backward : Pass::forward;
}

/// Operations of a multiprocessor's tensor cores in a cycle, for 16-bit types; 0 if unknown.
double tensor_flops_per_cycle(int arch) { return arch == 90 ? 4096 : arch == 80 ? 2048 : 0; }

/// In the process that ncu watches: the call, and before a backward pass the forward pass it belongs to.
int run_target(const Problem& problem, Pass pass, const Options& options) {
  Workload work = make_workload(problem, options, is_backward(pass));
  if (is_backward(pass)) run_forward(work);
  const auto workspace = attach_workspace(work, pass);
  call(work, pass);
  work.out.download();  // waits
  return ok;
}

std::string show(const CountedLaunch& launch, const HardwareCounter& counter) {
  const auto found = launch.values.find(counter.id);
  if (found == launch.values.end()) return "-";
  return format("%.4g %.*s", found->second * counter.scale, static_cast<int>(counter.unit.size()), counter.unit.data());
}

void print_launch(const CountedLaunch& launch) {
  std::printf("%s\n", launch.kernel.c_str());
  for (const HardwareCounter& counter : hardware_counters()) {
    std::printf("  %-20s %s\n", std::string(counter.name).c_str(), show(launch, counter).c_str());
  }
  std::vector<std::pair<double, std::string>> stalls;
  for (const auto& [id, reason] : stall_counters()) {
    if (const auto found = launch.values.find(id); found != launch.values.end()) stalls.emplace_back(found->second, reason);
  }
  std::sort(stalls.rbegin(), stalls.rend());
  std::printf("  %-20s", "stalled on");
  for (std::size_t i = 0; i < std::min<std::size_t>(4, stalls.size()); ++i) {
    std::printf("%s %s %.2f", i ? "," : "", stalls[i].second.c_str(), stalls[i].first);
  }
  std::puts(stalls.empty() ? " -" : " (warps per instruction issued)");
}

double total(const std::vector<CountedLaunch>& launches, std::string_view id) {
  double sum = 0;
  for (const CountedLaunch& launch : launches) {
    if (const auto found = launch.values.find(id); found != launch.values.end()) sum += found->second;
  }
  return sum;
}

void print_prediction(const std::vector<CountedLaunch>& launches, const Problem& problem, Pass pass,
                      const DeviceInfo& info) {
  const double seconds = total(launches, "gpu__time_duration.sum") * 1e-9;
  const double moved = total(launches, "dram__bytes_read.sum") + total(launches, "dram__bytes_write.sum");
  const double work = flops(problem, pass);
  const auto scores = static_cast<double>(problem.batch * problem.heads_q * problem.seq_q) *
                      static_cast<double>(problem.seq_kv) * static_cast<double>(size_of(problem.dtype));
  std::printf("the call: %s, %s\n", format_seconds(seconds).c_str(),
              format_flops(seconds > 0 ? work / seconds : 0).c_str());
  std::printf("  DRAM traffic %.4g MB; predicted %.4g MB (every tensor once); storing the scores would add %.4g MB\n",
              moved * 1e-6, min_bytes(problem, pass) * 1e-6, 2 * scores * 1e-6);
  const double cycles = total(launches, "sm__cycles_elapsed.max");
  const double peak = tensor_flops_per_cycle(info.arch) * info.num_sms * cycles;
  if (peak > 0 && problem.dtype != Dtype::float32) {
    std::printf("  tensor pipe: %.4g operations in %.4g cycles of %d SMs predict %.1f %% of its peak\n", work, cycles,
                info.num_sms, 100 * work / peak);
  }
}

Json launches_to_json(const std::vector<CountedLaunch>& launches) {
  Json json = Json::array();
  for (const CountedLaunch& launch : launches) {
    Json values = Json::object();
    for (const auto& [id, value] : launch.values) {
      if (id.find("__") != std::string::npos) values.add(id, value);
    }
    Json entry = Json::object();
    json.push(entry.add("kernel", launch.kernel).add("counters", values));
  }
  return json;
}

/// ncu's command line: every launch of the call, not those of the forward pass before a backward pass.
std::vector<std::string> ncu_words(const std::string& ncu, const Arguments& arguments, const Problem& problem, Pass pass,
                                   const DeviceInfo& info) {
  std::string counters = "sm__cycles_elapsed.max";
  for (const HardwareCounter& counter : hardware_counters()) counters += "," + std::string(counter.id);
  for (const auto& [id, reason] : stall_counters()) counters += "," + id;
  std::vector<std::string> words = {ncu, "--csv", "--page", "raw", "--metrics", counters};
  if (is_backward(pass)) {
    words.insert(words.end(), {"--launch-skip", std::to_string(make_plan(problem, Pass::forward, info).launches.size())});
  }
  words.insert(words.end(), {own_path(), "profile", "--target"});
  for (const std::string& word : arguments.words()) words.push_back(word);
  for (const Flag& flag : profile_verb.flags) {
    if (!arguments.given(flag.name) || flag.name == "json") continue;
    words.push_back("--" + std::string(flag.name));
    if (!flag.value.empty()) words.push_back(arguments.text(flag.name));
  }
  return words;
}

int profile(const Arguments& typed) {
  const KernelChoice choice = typed.words().empty() ? kernel_from(typed) : kernel_from(typed, typed.words()[0]);
  const Problem problem = problem_from(typed);
  Options options;
  options.device = device_from(typed);
  options.kernel = choice.name, options.tile = choice.tile;
  if (!device_traits(options.device).streams) {
    throw Error(ErrorCode::unavailable, "profile: Nsight Compute counts on NVIDIA GPUs alone, and the device is " +
                                            to_string(options.device) +
                                            "; flash-attention run --device emulator counts without one");
  }
  const Pass pass = pass_of(choice.name, typed.on("backward"));
  if (typed.on("target")) return run_target(problem, pass, options);
  const std::string ncu = find_program("ncu");
  if (ncu.empty()) {
    throw Error(ErrorCode::unavailable,
                "ncu: not found; install Nsight Compute (it comes with the CUDA toolkit) and put it "
                "on the PATH");
  }
  const DeviceInfo info = device_info(options.device);
  const Plan plan = make_plan(problem, pass, info, options.kernel, options.tile);
  const Finished finished = run_program(ncu_words(ncu, typed, problem, pass, info));
  if (finished.code != 0) {
    throw Error(ErrorCode::unavailable, "ncu: failed with code " + std::to_string(finished.code) + ":\n" + finished.output);
  }
  const std::vector<CountedLaunch> launches = parse_counters(finished.output);
  if (typed.on("json")) {
    Json json = Json::object();
    json.add("problem", to_json(problem)).add("kernel", plan.kernel).add("device_info", to_json(info));
    json.add("min_bytes", min_bytes(problem, pass)).add("flops", flops(problem, pass) * visible_share(problem));
    std::puts(json.add("launches", launches_to_json(launches)).text().c_str());
    return ok;
  }
  std::printf("problem  %s\ndevice   %s\nkernel   %s\n\n", describe(problem).c_str(), describe(info).c_str(),
              plan.kernel.c_str());
  for (const CountedLaunch& launch : launches) print_launch(launch);
  print_prediction(launches, problem, pass, info);
  return ok;
}

}  // namespace

const Verb profile_verb{
    "profile",
    "what a GPU's counters say about a kernel, and what the formulas predict",
    "Runs one call under Nsight Compute (`ncu`, which must be installed) and prints the most useful counters: time, DRAM\n"
    "bytes, tensor pipe, bank conflicts, occupancy, registers, and the reasons why warps wait. ncu replays every launch\n"
    "with the clocks held down and empty caches, so its times are not those of a benchmark.\n"
    "\n"
    "Examples:\n"
    "  flash-attention profile ladder/06_mma --seq-q 4096 --heads 16 --head-dim 128 --dtype bf16\n"
    "  flash-attention profile forward/sm90 --seq-q 8192 --head-dim 128 --dtype bf16 --causal\n"
    "  flash-attention profile --backward --seq-q 4096 --head-dim 64 --dtype bf16      the planner's choice\n",
    1,
    problem_flags() + std::vector<Flag>{{"backward", "", "the backward pass, where no kernel is named"},
                                        {"target", "", "(used by the verb itself) the process that ncu watches"},
                                        {"json", "", "print JSON"}},
    profile};

}  // namespace flash_attention::cli
