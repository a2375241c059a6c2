#include "flash_attention/tune.h"

#include <cstdio>
#include <fstream>
#include <iterator>

#include "cli/output/format.h"
#include "cli/output/json.h"
#include "cli/output/report.h"
#include "cli/output/terminal.h"
#include "cli/problem/problem_flags.h"
#include "cli/verb.h"
#include "flash_attention/error.h"

namespace flash_attention::cli {
namespace {

std::string read(const std::string& path, const char* flag) {
  std::ifstream file(path, std::ios::binary);
  std::string text{std::istreambuf_iterator<char>(file), {}};
  if (!file.is_open() || file.bad())
    throw Error(ErrorCode::invalid_argument, std::string(flag) + ": cannot read '" + path + "'");
  return text;
}

void write(const std::string& path, const std::string& text) {
  std::ofstream file(path, std::ios::binary);
  file << text;
  file.close();
  if (!file) throw Error(ErrorCode::invalid_argument, "--export: cannot write '" + path + "'");
}

std::string gain_in_words(const TuneResult& result) {
  if (result.choice == result.usual) return "stays";
  return format("%.2f times, noise %.1f %%", result.gain, 100 * result.noise);
}

Json json_of(const TuneResult& result) {
  Json json = Json::object();
  json.add("pass", to_string(result.tuned.pass)).add("problem", to_string(result.tuned.problem));
  if (!result.skipped.empty()) json.add("skipped", result.skipped);
  json.add("usual", result.usual).add("choice", result.choice);
  json.add("usual_s", result.usual_seconds).add("s", result.seconds).add("gain", result.gain).add("noise", result.noise);
  Json dropped = Json::array();
  for (const std::string& one : result.dropped) dropped.push(one);
  return json.add("contestants", result.contestants).add("dropped", dropped);
}

void print(const TuneResult& result) {
  std::printf("%s of %s\n", std::string(to_string(result.tuned.pass)).c_str(), to_string(result.tuned.problem).c_str());
  if (!result.skipped.empty()) {
    std::printf("  not measured: %s%s\n", result.skipped.c_str(),
                result.choice.empty() ? "" : (" (" + result.choice + ")").c_str());
  } else {
    std::printf("  %-52s %s\n", result.usual.c_str(), format_seconds(result.usual_seconds).c_str());
    if (result.choice != result.usual) {
      std::printf("  %-52s %s, %s\n", result.choice.c_str(), format_seconds(result.seconds).c_str(),
                  gain_in_words(result).c_str());
    } else if (result.noise > 0) {
      std::printf("  stays: none of %d others is faster by more than the noise, %.1f %%\n", result.contestants - 1,
                  100 * result.noise);
    } else {
      std::printf("  stays: none of %d others is near\n", result.contestants - 1);
    }
  }
  for (const std::string& dropped : result.dropped) std::printf("  DROPPED %s\n", dropped.c_str());
}

/// "[#####.....] 12 of 40, 31 s, 29 s left: forward of ..."
std::string bar(const TuneProgress& progress, double budget) {
  constexpr std::size_t width = 20;
  const std::size_t full = progress.of == 0 ? width : width * progress.done / progress.of;
  return "[" + std::string(full, '#') + std::string(width - full, '.') +
         format("] %zu of %zu, %.0f of %.0f s: ", progress.done, progress.of, progress.seconds, budget) + progress.now;
}

std::vector<TuneCase> cases_from(const Arguments& arguments, const Device& device) {
  if (arguments.given("problems")) return parse_tune_cases(read(arguments.text("problems"), "--problems"), arguments.text("problems"));
  if (!arguments.given("seq-q") && !arguments.given("seq-kv")) return usual_tune_cases(device_info(device));
  const Problem problem = problem_from(arguments);
  std::vector<TuneCase> cases{{problem, Pass::forward}};
  if (arguments.on("backward")) cases.push_back({problem, Pass::backward});
  return cases;
}

int import_from(const std::string& path, const Device& device) {
  const std::size_t count = import_tuned(device, read(path, "--import"), path);
  std::printf("%zu choices from %s\n", count, path.c_str());
  return ok;
}

int export_to(const std::string& path, const Device& device) {
  write(path, export_tuned(device));
  std::printf("written to %s\n", path.c_str());
  return ok;
}

/// The problems as they are planned now.
int time_here(const std::vector<TuneCase>& cases, const Device& device, bool as_json) {
  Json results = Json::array();
  Progress progress;
  for (const TuneCase& one : cases) {
    if (interrupted()) return interrupted_by_user;
    progress.show(to_string(one.problem));
    const TuneResult result = time_cases(device, {&one, 1}, 0.1).front();
    progress.clear();
    if (as_json) {
      results.push(json_of(result));
    } else {
      std::printf("%s of %s\n  %-52s %s\n", std::string(to_string(one.pass)).c_str(), to_string(one.problem).c_str(),
                  result.skipped.empty() ? result.choice.c_str() : result.skipped.c_str(),
                  format_seconds(result.seconds).c_str());
    }
  }
  if (as_json) std::puts(Json::object().add("results", results).text().c_str());
  return ok;
}

int tune_here(const Arguments& arguments, const Device& device) {
  const bool as_json = arguments.on("json");
  const double budget = arguments.number("budget", 0);
  const std::vector<TuneCase> cases = cases_from(arguments, device);
  if (arguments.on("compile-only")) {
    std::printf("%zu kernels for %zu problems are compiled\n", compile_for_tuning(device, cases), cases.size());
    return ok;
  }
  if (arguments.on("time")) return time_here(cases, device, as_json);
  Progress progress;
  Json results = Json::array();
  std::size_t changed = 0;
  const TuneReport report = tune(device, cases,
                                 {.seconds = budget,
                                  .again = arguments.on("again"),
                                  .stops = interrupted,
                                  .progress = [&](const TuneProgress& now) { progress.show(bar(now, budget)); },
                                  .result =
                                      [&](const TuneResult& result) {
                                        progress.clear();
                                        changed += result.skipped.empty() && result.choice != result.usual;
                                        as_json ? (void)results.push(json_of(result)) : print(result);
                                        std::fflush(stdout);
                                      }});
  progress.clear();
  if (as_json) {
    Json json = Json::object();
    std::puts(json.add("device", to_json(device_info(device)))
                  .add("finished", report.finished)
                  .add("path", report.path)
                  .add("results", results)
                  .text()
                  .c_str());
  } else {
    std::printf("\n%zu of %zu problems have a faster choice now", changed, report.results.size());
    if (!report.path.empty()) std::printf(", kept in %s", report.path.c_str());
    std::puts("");
    if (!report.finished)
      std::printf("stopped before the end: %zu of %zu problems; the same command goes on\n", report.results.size(), cases.size());
  }
  if (arguments.given("export")) export_to(arguments.text("export"), device);
  return interrupted() ? static_cast<int>(interrupted_by_user) : static_cast<int>(ok);
}

int tune_verb_run(const Arguments& arguments) {
  const Device device = device_from(arguments);
  if (arguments.given("import")) return import_from(arguments.text("import"), device);
  const bool only_export = arguments.given("export") && !arguments.given("problems") && arguments.number("budget", 0) == 0;
  return only_export ? export_to(arguments.text("export"), device) : tune_here(arguments, device);
}

}  // namespace

const Verb tune_verb{
    "tune",
    "measures kernels, tiles, stages and splits on this machine and keeps the fastest",
    "The planner chooses by rules that were made on other machines. This verb measures, for each problem of a list, the\n"
    "other possible choices, alternating with the planner's own. It keeps a choice that is faster by more than the noise\n"
    "of the measurement. Results are compared: a choice with wrong results is dropped and named. Choices are stored next\n"
    "to the compiled kernels; from then on every program of this user on this device uses them, except for calls with\n"
    "invariant bits. `flash-attention plan` says if one is used. FLASH_ATTENTION_TUNED=off ignores them.\n"
    "\n"
    "It measures common problems, or one problem that flags describe (--seq-q ...), or the problems of --problems FILE: a\n"
    "JSON array of {\"pass\": \"forward\", \"problem\": {\"batch\": 1, ...}}, or one such object per line. A program that\n"
    "runs with FLASH_ATTENTION_RECORD=FILE writes such a file.\n"
    "\n"
    "Examples:\n"
    "  flash-attention tune --budget 120\n"
    "  FLASH_ATTENTION_RECORD=calls.jsonl python train.py; flash-attention tune --problems calls.jsonl\n"
    "  flash-attention tune --budget 0 --export rtx4090.json    write the choices made so far, to share them\n"
    "  flash-attention tune --import rtx4090.json\n",
    0,
    problem_flags() +
        std::vector<Flag>{{"problems", "FILE", "measure the problems of this file instead of the common ones"},
                          {"backward", "", "with --seq-q: also the backward pass"},
                          {"budget", "SECONDS", "time limit; choices measured until then are kept", "60"},
                          {"again", "", "also measure problems that were tuned before"},
                          {"compile-only", "", "compile all choices, measure nothing"},
                          {"time", "", "only measure the problems as they are planned now"},
                          {"export", "FILE", "write all choices for this device, at the end"},
                          {"import", "FILE", "use the choices of a file instead of measuring"},
                          {"json", "", "print JSON"}},
    tune_verb_run};

}  // namespace flash_attention::cli
