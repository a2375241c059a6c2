#include "support/compile.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <set>
#include <sstream>

#include "jit/compile.h"
#include "jit/nvrtc/nvrtc.h"
#include "support/child.h"

namespace flash_attention::testing {
namespace {

/// The report as numbers, then one warning a line.
std::string to_text(const jit::CompileReport& report) {
  std::ostringstream text;
  text << report.registers << ' ' << report.stack_bytes << ' ' << report.spill_store_bytes << ' ' << report.spill_load_bytes
       << ' ' << report.shared_bytes << '\n';
  for (const std::string& warning : report.wgmma_warnings) text << warning << '\n';
  return text.str();
}

jit::CompileReport from_text(const std::string& text) {
  std::istringstream in(text);
  jit::CompileReport report;
  in >> report.registers >> report.stack_bytes >> report.spill_store_bytes >> report.spill_load_bytes >>
      report.shared_bytes;
  in.ignore();
  for (std::string line; std::getline(in, line);) report.wgmma_warnings.push_back(line);
  return report;
}

Child start(const jit::KernelKey& key) {
  // A configuration that another test has compiled comes from the cache, with the compiler's report.
  return Child([key] { return to_text(jit::compiled(key)->report); });
}

CompileOutcome finish(Child& child, const jit::KernelKey& key) {
  const ChildResult result = child.finish();
  if (result.signal != 0) return {to_string(key), "the compiler crashed with signal " + std::to_string(result.signal), {}};
  if (result.exit_code != 0) return {to_string(key), result.output, {}};
  return {to_string(key), {}, from_text(result.output)};
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
  std::set<jit::KernelKey> seen;
  std::vector<jit::KernelKey> keys;
  std::vector<int> dynamic_bytes;
  for (const Plan& plan : plans) {
    for (const Launch& launch : plan.launches) {
      const jit::KernelKey key = jit::make_key(launch, arch);
      if (!seen.insert(key).second) continue;
      keys.push_back(key);
      dynamic_bytes.push_back(launch.shared_bytes);
    }
  }
  const auto outcomes = compile_in_children(keys);
  for (std::size_t i = 0; i < outcomes.size(); ++i) {
    const auto& [name, error, report] = outcomes[i];
    SCOPED_TRACE(name);
    EXPECT_EQ(error, "");
    EXPECT_LE(report.spill_store_bytes, allowed_spill_bytes) << "registers are spilled to memory";
    EXPECT_LE(report.spill_load_bytes, allowed_spill_bytes) << "registers are spilled to memory";
    EXPECT_LE(dynamic_bytes[i] + report.shared_bytes, shared_limit(arch)) << "shared memory of one block";
    for (const std::string& warning : report.wgmma_warnings) ADD_FAILURE() << warning;
  }
}

void expect_plan_compiles(const Plan& plan, int arch) { expect_plans_compile({plan}, arch); }

}  // namespace flash_attention::testing
