#include "support/compile.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstdlib>
#include <ctime>
#include <fstream>
#include <map>
#include <regex>
#include <sstream>

#include "jit/compile.h"
#include "jit/nvrtc/nvrtc.h"
#include "support/child.h"

namespace flash_attention::testing {
namespace {

std::string environment(const char* name) {
  const char* value = std::getenv(name);
  return value == nullptr ? "" : value;
}

/// Writes the file that tools/machine_code.py reads: a line for each kernel of a test. FLASH_ATTENTION_RECORD names the
/// file. FLASH_ATTENTION_RECORD_ONLY is a regex: kernels whose names do not match are listed, but not compiled.
class Record {
 public:
  bool wants(const jit::KernelKey& key) const { return !is_on_ || std::regex_search(to_string(key), only_); }

  /// One line: test#plan.launch, name, CPU seconds of the compiler (0: from the cache), file, registers, spilled bytes,
  /// number of warnings about wgmma.
  void add(const std::string& where, const jit::KernelKey& key, const CompileOutcome& outcome) const {
    if (!is_on_) return;
    const auto& report = outcome.report;
    std::ofstream(path_, std::ios::app) << where + '\t' + to_string(key) + '\t' + std::to_string(outcome.seconds) + '\t' +
                                               outcome.path + '\t' + std::to_string(report.registers) + '\t' +
                                               std::to_string(report.spill_store_bytes + report.spill_load_bytes) + '\t' +
                                               std::to_string(report.wgmma_warnings.size()) + '\n';
  }

 private:
  const std::string path_ = environment("FLASH_ATTENTION_RECORD");
  const bool is_on_ = !path_.empty();
  const std::regex only_{environment("FLASH_ATTENTION_RECORD_ONLY")};
};

std::string name_of_test() {
  const auto* test = ::testing::UnitTest::GetInstance()->current_test_info();
  return std::string(test->test_suite_name()) + "." + test->name();
}

/// The report as numbers, the compiler's seconds and file, then one warning a line.
std::string to_text(const jit::CompiledKernel& kernel) {
  const jit::CompileReport& report = kernel.report;
  std::ostringstream text;
  text << report.registers << ' ' << report.stack_bytes << ' ' << report.spill_store_bytes << ' ' << report.spill_load_bytes
       << ' ' << report.shared_bytes << ' ' << (kernel.compiled ? static_cast<double>(std::clock()) / CLOCKS_PER_SEC : 0.0)
       << '\n'
       << kernel.path.string() << '\n';
  for (const std::string& warning : report.wgmma_warnings) text << warning << '\n';
  return text.str();
}

CompileOutcome from_text(const std::string& name, const std::string& text) {
  std::istringstream in(text);
  CompileOutcome outcome{.name = name};
  jit::CompileReport& report = outcome.report;
  in >> report.registers >> report.stack_bytes >> report.spill_store_bytes >> report.spill_load_bytes >>
      report.shared_bytes >> outcome.seconds;
  in.ignore();
  std::getline(in, outcome.path);
  for (std::string line; std::getline(in, line);) report.wgmma_warnings.push_back(line);
  return outcome;
}

Child start(const jit::KernelKey& key) {
  // A configuration that another test has compiled comes from the cache, with the compiler's report.
  return Child([key] { return to_text(*jit::compiled(key)); });
}

CompileOutcome finish(Child& child, const jit::KernelKey& key) {
  const ChildResult result = child.finish();
  if (result.signal != 0) return {to_string(key), "the compiler crashed with signal " + std::to_string(result.signal)};
  if (result.exit_code != 0) return {to_string(key), result.output};
  return from_text(to_string(key), result.output);
}

}  // namespace

std::vector<CompileOutcome> compile_in_children(const std::vector<jit::KernelKey>& keys) {
  constexpr std::size_t at_a_time = 2;
  std::vector<CompileOutcome> outcomes;
  std::vector<Child> children;
  for (std::size_t i = 0; i < keys.size(); ++i) {
    for (; children.size() < std::min(keys.size(), i + at_a_time);) children.push_back(start(keys[children.size()]));
    outcomes.push_back(finish(children[i], keys[i]));
  }
  return outcomes;
}

std::string why_no_compiler() {
  // In a child, so that the test's own process never loads NVRTC before it forks.
  static const std::string reason = [] {
    const ChildResult result = run_in_child([] { return jit::Nvrtc::instance().identity(); });
    return result.exit_code == 0 ? std::string() : result.output;
  }();
  return reason;
}

int shared_limit(int arch) {
  switch (arch) {
    case 70:
      return 96 * 1024;
    case 75:
      return 64 * 1024;
    case 80:
    case 87:
      return 163 * 1024;
    case 86:
    case 89:
    case 120:
      return 99 * 1024;
    default:
      return 227 * 1024;
  }
}

void expect_plans_compile(const std::vector<Plan>& plans, int arch, int allowed_spill_bytes) {
  static const Record record;
  static std::map<std::string, int> plans_of_test;
  std::map<jit::KernelKey, int> dynamic_bytes;
  std::vector<jit::KernelKey> keys;
  std::vector<std::pair<std::string, jit::KernelKey>> places;
  for (const Plan& plan : plans) {
    const std::string test = name_of_test();
    const std::string place = test + "#" + std::to_string(plans_of_test[test]++);
    for (std::size_t i = 0; i < plan.launches.size(); ++i) {
      const jit::KernelKey key = jit::make_key(plan.launches[i], arch);
      places.emplace_back(place + "." + std::to_string(i), key);
      if (dynamic_bytes.emplace(key, plan.launches[i].shared_bytes).second && record.wants(key)) keys.push_back(key);
    }
  }
  std::map<jit::KernelKey, CompileOutcome> outcomes;
  for (CompileOutcome& outcome : compile_in_children(keys)) outcomes.emplace(keys[outcomes.size()], std::move(outcome));
  for (const auto& [key, outcome] : outcomes) {
    const auto& report = outcome.report;
    SCOPED_TRACE(outcome.name);
    EXPECT_EQ(outcome.error, "");
    EXPECT_LE(report.spill_store_bytes, allowed_spill_bytes) << "registers are spilled to memory";
    EXPECT_LE(report.spill_load_bytes, allowed_spill_bytes) << "registers are spilled to memory";
    EXPECT_LE(dynamic_bytes[key] + report.shared_bytes, shared_limit(arch)) << "shared memory of one block";
    for (const std::string& warning : report.wgmma_warnings) ADD_FAILURE() << warning;
  }
  for (const auto& [place, key] : places) record.add(place, key, outcomes[key]);
}

void expect_plan_compiles(const Plan& plan, int arch) { expect_plans_compile({plan}, arch); }

}  // namespace flash_attention::testing
