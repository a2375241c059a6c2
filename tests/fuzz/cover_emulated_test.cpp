// Covering arrays in the emulator, one for each kernel: a part of it in `make test`, all of it and several schedules of
// each problem in the long tail. Compiling takes most of the time, so several problems share a configuration. At the end
// every marked branch of the kernel (kernels/ptx/path.cuh) has been taken.
#include <gtest/gtest.h>

#include <regex>

#include "emulator/paths.h"
#include "emulator/seed.h"
#include "fuzz/check_problem.h"
#include "jit/embedded.h"

namespace flash_attention::fuzz {
namespace {

struct Part {
  const char* kernel;
  int configurations;                   // in `make test`
  std::vector<std::string_view> plain;  // head dimensions without an option that touches every score: kernels have ways of
                                        // their own for them
};

constexpr int share = 5;
constexpr Sizes small{.longest = 290, .most_products = 4e6};
constexpr Sizes longer{.longest = 420, .most_products = 1e7};

/// More keys than queries under a causal mask: tiles inside of it and at its edge; and NaN that some queries see.
Domain plain_domain(const char* kernel, std::string_view dim) {
  Domain domain = domain_of(kernel);
  domain.only(softcap, {"off"}).only(bias, {"off"}).only(alibi, {"off"}).only(mask, {"off"}).only(dropout, {"off"});
  domain.only(head_dim, {dim}).only(head_dim_v, {"same"}).only(queries, {"edge"}).only(keys, {"long"});
  domain.only(deterministic, {dim == "128" ? "on" : "off"})
      .only(packed, {"off"})
      .only(seqused_q, {"off"})
      .only(window, {"causal"})
      .only(alignment, {"bottom_right"});
  return domain.only(scale, {"default", "given"}).only(inputs, {"normal", "growing", "nan_key", "nan_value", "nan_query"});
}

/// The marks of a kernel, from its sources.
std::set<std::string> paths_of(const std::string& kernel) {
  std::set<std::string> names;
  const std::regex mark("ptx::path<\"([^\"]+)\">");
  for (const jit::EmbeddedFile& file : jit::embedded_files()) {
    const std::string text(file.text);
    for (std::sregex_iterator m(text.begin(), text.end(), mark), end; m != end; ++m)
      if (m->str(1).starts_with(kernel + " ")) names.insert(m->str(1));
  }
  return names;
}

class CoverEmulated : public ::testing::TestWithParam<Part> {
 protected:
  const std::string kernel_ = GetParam().kernel;
  const testing::Target target_{
      .device = {.kind = DeviceKind::emulator, .emulated_arch = kernel_.ends_with("sm90") ? 90 : 80},
      .kernel = kernel_,
      .pass = kernel_.starts_with("backward") ? Pass::backward : Pass::forward};

  void run(const Domain& domain, int configurations, const Sizes& sizes) {
    const int most_failures = GTEST_FLAG_GET(fail_fast) ? 0 : 3;
    for (const GeneratedProblem& problem : problems(domain, share, array_seed(), sizes)) {
      if (failed_ > most_failures || (!testing::with_long_tail() && problem.number >= share * configurations)) break;
      const testing::Expected expected = testing::expect(problem.c, testing::is_backward(target_.pass));
      for (int schedule = 0; schedule < (testing::with_long_tail() ? 3 : 1); ++schedule) {
        emulator::set_seed(static_cast<std::uint64_t>(problem.number * 3 + schedule));
        failed_ += !check_problem(problem, target_, expected);
      }
    }
  }

  int failed_ = 0;
};

TEST_P(CoverEmulated, MatchesTheOracleAndTakesEveryPath) {
  emulator::set_num_sms(3);  // so that a block takes several tiles, one after another
  run(domain_of(kernel_), GetParam().configurations, small);
  for (const std::string_view dim : GetParam().plain) run(plain_domain(GetParam().kernel, dim), 1, longer);
  if (HasFailure()) return;
  const std::set<std::string> taken = emulator::paths_taken();
  for (const std::string& path : paths_of(kernel_)) EXPECT_TRUE(taken.contains(path)) << path << " was not taken";
  EXPECT_FALSE(paths_of(kernel_).empty());
}

INSTANTIATE_TEST_SUITE_P(Kernels, CoverEmulated,
                         ::testing::Values(Part{"forward/portable", 3, {"64"}}, Part{"forward/sm80", 4, {"64"}},
                                           Part{"forward/sm90", 5, {"64", "256"}}, Part{"backward/portable", 2, {"64"}},
                                           Part{"backward/sm80", 2, {"64", "128"}},
                                           Part{"backward/sm90", 3, {"64", "128", "256"}}),
                         [](const auto& part) {
                           std::string name = part.param.kernel;
                           name[name.find('/')] = '_';
                           return name;
                         });

}  // namespace
}  // namespace flash_attention::fuzz
