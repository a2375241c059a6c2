#include <unistd.h>

#include <csignal>
#include <cstdio>
#include <cstring>
#include <thread>

#include "cli/format.h"
#include "cli/json.h"
#include "cli/problem_flags.h"
#include "cli/report.h"
#include "cli/stress_run.h"
#include "cli/terminal.h"
#include "cli/verb.h"

namespace flash_attention::cli {
namespace {

/// The command that repeats one problem.
std::string command_of(std::uint64_t seed, std::int64_t problem, const StressOptions& options,
                       const std::string& kernel_flag) {
  std::string text = "flash-attention stress --device " + std::string(to_string(options.device.kind));
  if (options.device.kind == DeviceKind::cuda) text += ":" + std::to_string(options.device.index);
  if (options.device.emulated_arch != 0) text += " --arch sm_" + std::to_string(options.device.emulated_arch);
  if (!kernel_flag.empty()) text += " --kernel " + kernel_flag;
  return text +
         format(" --seed %llu --problem %lld", static_cast<unsigned long long>(seed), static_cast<long long>(problem));
}

/// The problem that runs now, for the one message that a crash leaves time for.
char running[512];

void on_crash(int) {
  constexpr char text[] = "\nflash-attention: crashed; again: ";
  [[maybe_unused]] auto written = write(STDERR_FILENO, text, sizeof(text) - 1);
  written = write(STDERR_FILENO, running, std::strlen(running));
  written = write(STDERR_FILENO, "\n", 1);
  _exit(check_failed);
}

Json to_json(const StressReport& report, const StressOptions& options, const std::string& kernel_flag) {
  Json kernels = Json::object();
  for (const auto& [name, calls] : report.calls_of_kernel) kernels.add(name, calls);
  Json differences = Json::array();
  for (const Difference& d : report.differences) {
    Json lines = Json::array();
    for (const std::string& line : d.lines) lines.push(line);
    differences.push(Json::object()
                         .add("seed", d.seed)
                         .add("problem", d.problem)
                         .add("pass", to_string(d.pass))
                         .add("kernel", d.kernel)
                         .add("text", d.text)
                         .add("lines", lines)
                         .add("command", command_of(d.seed, d.problem, options, kernel_flag)));
  }
  return Json::object()
      .add("device", to_string(options.device))
      .add("seed", options.seed)
      .add("last_seed", report.last_seed)
      .add("problems", report.problems)
      .add("calls", report.calls)
      .add("seconds", report.seconds)
      .add("kernels", kernels)
      .add("device_lost", report.device_lost)
      .add("differences", differences);
}

void print(const StressReport& report, const StressOptions& options, const std::string& kernel_flag) {
  std::printf("device   %s\n", describe(device_info(options.device)).c_str());
  std::printf("problems %lld, %lld calls in %s; seeds %llu to %llu\n", static_cast<long long>(report.problems),
              static_cast<long long>(report.calls), format_seconds(report.seconds).c_str(),
              static_cast<unsigned long long>(options.seed), static_cast<unsigned long long>(report.last_seed));
  for (const auto& [name, calls] : report.calls_of_kernel)
    std::printf("         %-20s %lld calls\n", name.c_str(), static_cast<long long>(calls));
  for (const Difference& d : report.differences) {
    std::printf("\nDIFFERS  %s %s: %s\n", std::string(to_string(d.pass)).c_str(), d.kernel.c_str(), d.text.c_str());
    for (const std::string& line : d.lines) std::printf("         %s\n", line.c_str());
    std::printf("again    %s\n", command_of(d.seed, d.problem, options, kernel_flag).c_str());
  }
  if (report.device_lost) std::puts("\nThe device failed; nothing more could be run on it.");
  if (report.differences.empty()) std::puts("no difference");
}

int run_stress(const Arguments& arguments) {
  StressOptions options;
  options.device = device_from(arguments);
  const std::string kernel = arguments.text("kernel");
  options.every_kernel = kernel == "all";
  if (!options.every_kernel) options.kernel = kernel;
  options.seed = static_cast<std::uint64_t>(arguments.integer("seed", 0));
  if (arguments.given("problem")) options.only = arguments.integer("problem", 0);
  options.seconds = arguments.number("minutes", 0) * 60;
  if (arguments.given("problems")) {
    options.max_problems = arguments.integer("problems", 1);
    if (!arguments.given("minutes")) options.seconds = 1e9;
  }
  options.repeats = static_cast<int>(arguments.integer("repeats", 1, 1000));
  options.threads = static_cast<int>(std::max(1u, std::thread::hardware_concurrency()));
  if (!options.kernel.empty()) {
    bool known = false;
    for (const KernelSummary& k : kernels()) known = known || k.name == options.kernel;
    if (!known)
      throw Error(ErrorCode::invalid_argument, "--kernel: there is no kernel '" + kernel + "'; `plan` lists them");
  }

  for (const int signal : {SIGSEGV, SIGBUS, SIGFPE, SIGABRT}) std::signal(signal, on_crash);
  Progress progress;
  const StressReport report = stress(
      options,
      [&](std::uint64_t seed, std::int64_t problem) {
        std::snprintf(running, sizeof(running), "%s", command_of(seed, problem, options, kernel).c_str());
      },
      [&](const StressReport& so_far) {
        progress.show(format("%lld problems, %lld calls, %zu differences, %s", static_cast<long long>(so_far.problems),
                             static_cast<long long>(so_far.calls), so_far.differences.size(),
                             format_seconds(so_far.seconds).c_str()));
      },
      interrupted);
  progress.clear();
  if (arguments.on("json"))
    std::puts(to_json(report, options, kernel).text().c_str());
  else
    print(report, options, kernel);
  if (!report.differences.empty()) return check_failed;
  return interrupted() ? interrupted_by_user : ok;
}

}  // namespace

const Verb stress_verb{
    "stress",
    "random problems without end, each compared with fp64 and each call repeated",
    "Draws problems over all options, head dimensions, lengths, strides and element types, with inputs chosen to hurt\n"
    "(maxima that come late, large logits, ties, NaN behind a mask), so that every pair of them occurs. Forward and\n"
    "backward are compared with the same attention in fp64, computed by all cores of the host. Each call is repeated and\n"
    "its bits are compared: those of forward, and of a backward pass that is asked to be deterministic.\n"
    "\n"
    "Examples:\n"
    "  flash-attention stress --minutes 10\n"
    "  flash-attention stress --device cuda --problems 10000 --repeats 3 --json\n"
    "  flash-attention stress --device emulator --arch sm_90 --kernel forward/sm90\n"
    "\n"
    "Exits with 1 where something differs, with the command that repeats the problem.\n",
    0,
    {{"minutes", "M", "stop after so many minutes", "1"},
     {"problems", "N", "stop after so many problems; without --minutes there is no other bound"},
     {"seed", "N", "of the problems", "1"},
     {"problem", "N", "this problem of the seed alone"},
     {"repeats", "N", "calls of each pass", "2"},
     {"device", "D", "cpu, cuda, cuda:N, emulator or best", "best"},
     {"arch", "A", "architecture the emulator plays: sm_80, sm_90"},
     {"kernel", "NAME", "use this kernel; all: every kernel that takes a problem [= the planner's choice]"},
     {"json", "", "print JSON"}},
    run_stress};

}  // namespace flash_attention::cli
