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

int compile(const Arguments& arguments) {
  Options options;
  options.device = device_from(arguments);
  const std::string kernel = arguments.words().empty() ? arguments.text("kernel") : arguments.words().front();
  options.kernel = kernel;
  const std::vector<Problem> problems = arguments.on("common") ? common_problems() : std::vector{problem_from(arguments)};
  std::vector<Pass> passes{arguments.on("backward") ? Pass::backward : Pass::forward};
  if (arguments.on("common")) passes = {Pass::forward, Pass::backward};

  Progress progress;
  Json done = Json::array();
  const DeviceInfo info = device_info(options.device);
  for (const Problem& problem : problems) {
    for (const Pass pass : passes) {
      if (interrupted()) break;
      const Plan plan = make_plan(problem, pass, info, options.kernel);
      progress.show(format("%zu of %zu: %s", done.size() + 1, problems.size() * passes.size(), plan.kernel.c_str()));
      prewarm(problem, pass, options);
      Json entry = Json::object();
      done.push(entry.add("kernel", plan.kernel).add("pass", to_string(pass)).add("problem", to_json(problem)));
      progress.clear();
      if (!arguments.on("json")) std::printf("ready  %-20s %s\n", plan.kernel.c_str(), describe(problem).c_str());
    }
  }
  if (arguments.on("json")) std::puts(done.text().c_str());
  if (!arguments.on("json")) std::printf("in %s\n", cache_directory().c_str());
  return interrupted() ? interrupted_by_user : ok;
}

}  // namespace

const Verb compile_verb{
    "compile",
    "compiles kernels ahead of time, so that no call waits for a compiler",
    "GPU kernels are compiled on first use and kept on disk. This makes them beforehand: for one problem, described by "
    "the\n"
    "same flags as `run`, or with --common for what most models ask for.\n"
    "\n"
    "Examples:\n"
    "  flash-attention compile --common\n"
    "  flash-attention compile forward/sm90 --head-dim 128 --dtype bf16 --causal\n",
    1,
    problem_flags() + std::vector<Flag>{{"backward", "", "compile the backward pass"},
                                        {"common", "", "the usual widths, both 16-bit types, full and causal, both passes"},
                                        {"json", "", "print JSON"}},
    compile};

}  // namespace flash_attention::cli
