// The generator's promise: every pair of levels that a problem can have occurs in its covering array.
#include "fuzz/generator/cover.h"

#include <gtest/gtest.h>

#include <set>

#include "fuzz/generator/draw_case.h"
#include "fuzz/generator/problems.h"

namespace flash_attention::fuzz {
namespace {

constexpr const char* kernels[] = {"", "forward/sm80", "backward/sm90"};  // all levels, and two selections

int num_levels(int factor) { return static_cast<int>(levels_of(static_cast<Factor>(factor)).size()); }

/// Written out once more, so that a pair that is lost by the generator's own rule is seen.
bool possible(Factor a, std::string_view x, Factor b, std::string_view y) {
  const auto off_without = [&](Factor detail, Factor option) {
    return a == option && b == detail ? (x == "off") == (y == "unused") : true;
  };
  const auto needs = [&](Factor gradient, std::string_view level, Factor option) {
    const bool forwards = a == option && b == gradient && y == level,
               backwards = b == option && a == gradient && x == level;
    return !(forwards && (x == "off" || x == "unused")) && !(backwards && (y == "off" || y == "unused"));
  };
  if (a == inputs && b == slopes && x.starts_with("nan_") && y.starts_with("strong")) return false;  // 0 * NaN
  return off_without(bias_shape, bias) && off_without(slopes, alibi) && off_without(mask_shape, mask) &&
         off_without(bounds, packed) && off_without(sinks, sink) && needs(dbias, "on", bias) && needs(dsink, "on", sink) &&
         needs(dbias, "on", bias_shape) && needs(dsink, "on", sinks) && needs(inputs, "infinite_bias", bias) &&
         needs(inputs, "infinite_bias", bias_shape);
}

TEST(Cover, EveryPairOccurs) {
  for (const char* kernel : kernels) {
    for (const int share : {1, 8}) {
      const Domain domain = domain_of(kernel);
      std::set<std::array<int, 4>> seen;
      for (const Row& row : cover(domain, share, 7)) {
        for (int a = 0; a < num_factors; ++a) ASSERT_GE(row[a], 0) << name_of(static_cast<Factor>(a));
        for (int a = 0; a < num_factors; ++a)
          for (int b = a + 1; b < num_factors; ++b) seen.insert({a, row[a], b, row[b]});
      }
      for (int a = 0; a < num_factors; ++a) {
        for (int b = a + 1; b < num_factors; ++b) {
          for (int x = 0; x < num_levels(a); ++x) {
            for (int y = 0; y < num_levels(b); ++y) {
              const Factor f = static_cast<Factor>(a), g = static_cast<Factor>(b);
              const bool allowed = domain.has(a, x) && domain.has(b, y) && possible(f, levels_of(f)[x], g, levels_of(g)[y]);
              EXPECT_EQ(seen.contains({a, x, b, y}), allowed) << kernel << ": " << name_of(f) << " " << levels_of(f)[x]
                                                              << " with " << name_of(g) << " " << levels_of(g)[y];
            }
          }
        }
      }
    }
  }
}

TEST(Cover, IsTheSameForTheSameSeed) {
  const auto text = [](std::uint64_t seed) {
    std::string all;
    for (const Row& row : cover(domain_of(""), 4, seed)) all += to_string(row) + "\n";
    return all;
  };
  EXPECT_EQ(text(3), text(3));
  EXPECT_NE(text(3), text(4));
}

/// Rows of one configuration differ only in what is known when a kernel runs.
TEST(Cover, RowsShareTheirConfiguration) {
  const std::vector<Row> rows = cover(domain_of("forward/sm90"), 5, 1);
  ASSERT_EQ(rows.size() % 5, 0u);
  for (std::size_t n = 0; n < rows.size(); ++n) {
    for (int factor = 0; factor < num_compiled; ++factor) EXPECT_EQ(rows[n][factor], rows[n - n % 5][factor]);
  }
}

/// A level is worth something only if the problem has it: no option may get lost between the row and the call.
TEST(Cover, ProblemsHaveTheirLevels) {
  for (const GeneratedProblem& g : problems("", 4, 11)) {
    const Problem& p = g.c.problem;
    SCOPED_TRACE(g.c.name);
    EXPECT_EQ(p.packed, g.row.is(packed, "on"));
    EXPECT_EQ(p.bias.present, !g.row.is(bias, "off"));
    EXPECT_EQ(p.mask.present, g.row.is(mask, "on"));
    EXPECT_EQ(p.alibi, g.row.is(alibi, "on"));
    EXPECT_EQ(p.sink, g.row.is(sink, "on"));
    EXPECT_EQ(p.softcap > 0, !g.row.is(softcap, "off"));
    EXPECT_EQ(p.dropout_p > 0, !g.row.is(dropout, "off"));
    EXPECT_EQ(p.window_left >= 0, g.row.level(window).find("left") != std::string_view::npos || g.row.is(window, "both"));
    EXPECT_EQ(p.causal, g.row.level(window).starts_with("causal"));
    EXPECT_EQ(g.c.dbias, g.row.is(dbias, "on"));
    EXPECT_NO_THROW(make_plan(p, Pass::backward, device_info({})));
  }
}

}  // namespace
}  // namespace flash_attention::fuzz
