#include "cli/stress/stress_report.h"

#include <algorithm>
#include <cstdio>

#include "cli/output/format.h"
#include "cli/output/report.h"

namespace flash_attention::cli {
namespace {

Json difference_to_json(const Difference& d) {
  Json lines = Json::array();
  for (const std::string& line : d.lines) lines.push(line);
  return Json::object()
      .add("seed", d.problem.seed)
      .add("problem", d.problem.number)
      .add("variant", d.problem.variant)
      .add("pass", d.pass)
      .add("kernel", d.kernel)
      .add("text", d.text)
      .add("lines", lines)
      .add("command", d.command);
}

Difference difference_from(const JsonValue& json) {
  Difference d{.problem = {static_cast<std::uint64_t>(json["seed"].number()),
                           static_cast<std::int64_t>(json["problem"].number()), static_cast<int>(json["variant"].number())},
               .pass = json["pass"].text(),
               .kernel = json["kernel"].text(),
               .text = json["text"].text(),
               .command = json["command"].text()};
  for (const JsonValue& line : json["lines"].items()) d.lines.push_back(line.text());
  return d;
}

}  // namespace

void add(StressReport& sum, const StressReport& part) {
  sum.problems += part.problems;
  sum.calls += part.calls;
  for (const auto& [name, calls] : part.calls_of_kernel) sum.calls_of_kernel[name] += calls;
  sum.compiled.insert(part.compiled.begin(), part.compiled.end());
  sum.last_seed = std::max(sum.last_seed, part.last_seed);
  sum.device_lost = sum.device_lost || part.device_lost;
  sum.cut_off = sum.cut_off || part.cut_off;
  sum.differences.insert(sum.differences.end(), part.differences.begin(), part.differences.end());
}

Json to_json(const StressReport& report, bool for_sum) {
  Json kernels = Json::object(), differences = Json::array(), hashes = Json::array();
  for (const auto& [name, calls] : report.calls_of_kernel) kernels.add(name, calls);
  for (const Difference& d : report.differences) differences.push(difference_to_json(d));
  for (const std::string& hash : report.compiled) hashes.push(hash);
  return Json::object()
      .add("last_seed", report.last_seed)
      .add("problems", report.problems)
      .add("calls", report.calls)
      .add("compiled", for_sum ? hashes : Json(report.compiled.size()))
      .add("seconds", report.seconds)
      .add("kernels", kernels)
      .add("device_lost", report.device_lost)
      .add("cut_off", report.cut_off)
      .add("differences", differences);
}

StressReport report_from(const JsonValue& json) {
  StressReport report{.problems = static_cast<std::int64_t>(json["problems"].number()),
                      .calls = static_cast<std::int64_t>(json["calls"].number()),
                      .last_seed = static_cast<std::uint64_t>(json["last_seed"].number()),
                      .seconds = json["seconds"].number(),
                      .device_lost = json["device_lost"].flag(),
                      .cut_off = json["cut_off"].flag()};
  for (const auto& [name, calls] : json["kernels"].members())
    report.calls_of_kernel[name] = static_cast<std::int64_t>(calls.number());
  for (const JsonValue& hash : json["compiled"].items()) report.compiled.insert(hash.text());
  for (const JsonValue& d : json["differences"].items()) report.differences.push_back(difference_from(d));
  return report;
}

void print(const StressReport& report) {
  std::printf("problems %lld, %lld calls, %zu kernels compiled, in %s\n", static_cast<long long>(report.problems),
              static_cast<long long>(report.calls), report.compiled.size(), format_seconds(report.seconds).c_str());
  for (const auto& [name, calls] : report.calls_of_kernel)
    std::printf("         %-20s %lld calls\n", name.c_str(), static_cast<long long>(calls));
  for (const Difference& d : report.differences) {
    std::printf("\nDIFFERS  %s %s: %s\n", d.pass.c_str(), d.kernel.c_str(), d.text.c_str());
    for (const std::string& line : d.lines) std::printf("         %s\n", line.c_str());
    std::printf("again    %s\n", d.command.c_str());
  }
  if (report.device_lost) std::puts("\nThe device failed; nothing more could be run on it.");
  if (report.cut_off) std::puts("The time was up while some problems were still under way.");
  if (report.compared_nothing())
    std::puts("nothing was compared: the kernel took none of the problems");
  else if (report.differences.empty())
    std::puts("no difference");
  else
    std::printf("\n%zu differences in %lld problems\n", report.differences.size(), static_cast<long long>(report.problems));
}

}  // namespace flash_attention::cli
