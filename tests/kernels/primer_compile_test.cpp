#include <set>

#include "kernels/primer.h"
#include "support/compile.h"

namespace flash_attention::testing {
namespace {

TEST(Primer, CompilesWithoutSpills) {
  if (const std::string reason = why_no_compiler(); !reason.empty()) GTEST_SKIP() << reason;
  std::set<jit::KernelKey> keys;
  for (const PrimerCase& primer : primer_cases()) {
    for (const int arch : {80, 90}) {
      jit::KernelKey key;
      key.unit = primer.unit;
      key.entry = primer.entry;
      key.arch = arch;
      key.plain = true;
      keys.insert(key);
    }
  }
  const auto outcomes = compile_in_children({keys.begin(), keys.end()});
  ASSERT_EQ(outcomes.size(), keys.size());
  for (const CompileOutcome& outcome : outcomes) {
    EXPECT_EQ(outcome.error, "") << outcome.name;
    EXPECT_EQ(outcome.report.spill_store_bytes, 0) << outcome.name;
    EXPECT_GT(outcome.report.registers, 0) << outcome.name;
  }
}

}  // namespace
}  // namespace flash_attention::testing
