#include <unistd.h>

#include <algorithm>
#include <csignal>
#include <cstdio>
#include <cstring>
#include <thread>

#include "cli/output/format.h"
#include "cli/output/report.h"
#include "cli/output/terminal.h"
#include "cli/problem/problem_flags.h"
#include "cli/stress/stress_jobs.h"
#include "cli/stress/stress_run.h"
#include "cli/verb.h"
#include "cli/verbs/process.h"

namespace flash_attention::cli {
namespace {

constexpr int max_jobs = 256, default_most_jobs = 16;

/// The problem that runs now, for the one message that a crash leaves time for.
char running[512];

void on_crash(int signal) {
  constexpr char text[] = "\nflash-attention: crashed; again: ";
  [[maybe_unused]] auto written = write(STDERR_FILENO, text, sizeof(text) - 1);
  written = write(STDERR_FILENO, running, std::strlen(running));
  written = write(STDERR_FILENO, "\n", 1);
  std::signal(signal, SIG_DFL);  // the process that waits for this one learns how it died
  std::raise(signal);
}

/// SIGTERM, which `timeout` sends, stops as Ctrl-C does: what was done is reported.
volatile std::sig_atomic_t terminated = 0;
bool stopped() { return interrupted() || terminated != 0; }

int cores() { return static_cast<int>(std::max(1u, std::thread::hardware_concurrency())); }

int jobs_of(const Arguments& arguments, const Device& device) {
  if (arguments.given("jobs")) return static_cast<int>(arguments.integer("jobs", 1, max_jobs));
  return device_traits(device).streams ? std::min(cores(), default_most_jobs) : 1;
}

void check_known(const char* flag, const std::string& kernel) {
  const std::vector<KernelSummary> all = kernels();
  if (kernel.empty() || std::any_of(all.begin(), all.end(), [&](const KernelSummary& k) { return k.name == kernel; }))
    return;
  throw Error(ErrorCode::invalid_argument, std::string(flag) + ": there is no kernel '" + kernel + "'; `plan` lists them");
}

StressOptions options_of(const Arguments& arguments) {
  StressOptions options;
  options.device = device_from(arguments);
  const std::string kernel = arguments.text("kernel");
  options.every_kernel = kernel == "all";
  if (!options.every_kernel) options.kernel = kernel;
  options.seed = static_cast<std::uint64_t>(arguments.integer("seed", 0));
  if (arguments.given("problem")) options.only = arguments.integer("problem", 0);
  if (arguments.given("variant")) options.variant = static_cast<int>(arguments.integer("variant", 0, 1 << 20));
  options.variants = arguments.given("variants")                 ? static_cast<int>(arguments.integer("variants", 1, 900))
                     : device_traits(options.device).gpu_kernels ? 8
                                                                 : 1;
  options.seconds = arguments.number("minutes", 0) * 60;
  if (arguments.given("problems")) {
    options.max_problems = arguments.integer("problems", 1);
    if (!arguments.given("minutes")) options.seconds = 1e9;
  }
  options.repeats = static_cast<int>(arguments.integer("repeats", 1, 1000));
  options.domain = arguments.text("domain");
  check_known("--kernel", options.kernel);
  check_known("--domain", options.domain);
  return options;
}

/// "3/16": the part of a process, counted from 1.
void take_part(StressOptions& options, const std::string& text) {
  int end = 0;
  const bool read = std::sscanf(text.c_str(), "%d/%d%n", &options.part, &options.parts, &end) == 2;
  if (!read || end != static_cast<int>(text.size()) || options.part < 1 || options.part > options.parts)
    throw Error(ErrorCode::invalid_argument, "--part: got '" + text + "'; it is N/M with 1 <= N <= M");
  --options.part;
}

/// The commands of the processes that share the work.
std::vector<std::vector<std::string>> commands_of(const Arguments& arguments, const StressOptions& options, int jobs) {
  std::vector<std::vector<std::string>> commands;
  for (int job = 0; job < jobs; ++job) {
    std::vector<std::string> words{own_path(), "stress", "--lines"};
    for (const char* flag : {"device", "arch", "domain", "kernel", "seed", "variants", "repeats"})
      if (arguments.given(flag)) words.insert(words.end(), {std::string("--") + flag, arguments.text(flag)});
    words.insert(words.end(), {"--minutes", std::to_string(options.seconds / 60)});
    words.insert(words.end(), {"--part", format("%d/%d", job + 1, jobs), "--jobs", std::to_string(jobs)});
    commands.push_back(std::move(words));
  }
  return commands;
}

/// A process of several, or the only one.
StressReport work(const StressOptions& options, bool lines, Progress& progress) {
  const auto say = [](const std::string& line) {
    std::puts(line.c_str());
    std::fflush(stdout);
  };
  return stress(
      options,
      [&](const ProblemName& problem) {
        const std::string command = command_of(problem, options);
        std::snprintf(running, sizeof(running), "%s", command.c_str());
        if (lines) say(line_of_running(command));
      },
      [&](const StressReport& so_far) {
        if (lines) return say(line_of(so_far));
        progress.show(format("%lld problems, %lld calls, %zu differences, %s", static_cast<long long>(so_far.problems),
                             static_cast<long long>(so_far.calls), so_far.differences.size(),
                             format_seconds(so_far.seconds).c_str()));
      },
      stopped);
}

int run_stress(const Arguments& arguments) {
  StressOptions options = options_of(arguments);
  const int jobs = jobs_of(arguments, options.device);
  const bool lines = arguments.on("lines");
  if (arguments.given("part")) take_part(options, arguments.text("part"));
  options.threads = std::max(2, cores() / (lines ? jobs : 1));
  for (const int signal : {SIGSEGV, SIGBUS, SIGFPE, SIGABRT}) std::signal(signal, on_crash);
  std::signal(SIGTERM, [](int) { terminated = 1; });

  Progress progress;
  StressReport report;
  if (jobs > 1 && !lines && options.only < 0) {
    report = run_jobs(
        commands_of(arguments, options, jobs), options.max_problems, options.seconds,
        [&](const StressReport& so_far) {
          progress.show(format("%lld problems, %lld calls, %zu differences, %s", static_cast<long long>(so_far.problems),
                               static_cast<long long>(so_far.calls), so_far.differences.size(),
                               format_seconds(so_far.seconds).c_str()));
        },
        stopped);
  } else {
    report = work(options, lines, progress);
  }
  progress.clear();
  if (lines) return report.differences.empty() ? ok : check_failed;
  if (arguments.on("json")) {
    Json json = to_json(report, false);
    json.add("device", to_string(options.device)).add("seed", options.seed);
    std::puts(json.text().c_str());
  } else {
    std::printf("device   %s\n", describe(device_info(options.device)).c_str());
    print(report);
  }
  if (!report.differences.empty() || report.compared_nothing()) return check_failed;
  return stopped() ? interrupted_by_user : ok;
}

}  // namespace

const Verb stress_verb{
    "stress",
    "endless random problems, each compared with fp64 and each call repeated",
    "Draws problems over all options, head dimensions, lengths, strides and element types, with adversarial inputs\n"
    "(maxima that come late, large logits, ties, NaN behind a mask), so that every pair of them occurs. Forward and\n"
    "backward are compared with the same attention in fp64, computed by all cores of the host. Each call is repeated and\n"
    "its bits are compared: those of forward, and of backward if the problem is deterministic. On a GPU each problem has\n"
    "variants, which differ in batch, lengths, strides and inputs and need no other compilation, and several processes\n"
    "share the work.\n"
    "\n"
    "Examples:\n"
    "  flash-attention stress --minutes 10\n"
    "  flash-attention stress --device cuda --problems 10000 --repeats 3 --json\n"
    "  flash-attention stress --device emulator --arch sm_90 --kernel forward/sm90\n"
    "\n"
    "Exits with 1 if a result differs, and prints the command that repeats the problem; also if nothing was compared.\n"
    "The problems that a seed draws depend on the domain: with the same --domain and another --kernel, another kernel\n"
    "runs the same problem.\n",
    0,
    {{"minutes", "M", "stop after so many minutes", "1"},
     {"problems", "N", "stop after N problems; without --minutes there is no other limit"},
     {"seed", "N", "seed of the problems", "1"},
     {"problem", "N", "only this problem of the seed"},
     {"variant", "N", "with --problem: only this variant of it"},
     {"variants", "N", "problems that share their compiled kernels [= 8 on a GPU and in the emulator, 1 on the CPU]"},
     {"repeats", "N", "calls of each pass", "2"},
     {"jobs", "N", "processes that share the work [= one a core, at most 16, on a GPU; else 1]"},
     {"part", "N/M", "only the N-th of M parts of the work"},
     {"lines", "", "a line of JSON before and after each problem, as --jobs reads them"},
     {"device", "D", "cpu, cuda, cuda:N, emulator or best", "best"},
     {"arch", "A", "architecture that the emulator plays: sm_80, sm_89, sm_90, sm_100, sm_120"},
     {"domain", "NAME", "draw problems that this kernel supports [= --kernel, or several kernels in turn]"},
     {"kernel", "NAME", "use this kernel; all: every kernel that supports a problem [= the planner's choice]"},
     {"json", "", "print JSON"}},
    run_stress};

}  // namespace flash_attention::cli
