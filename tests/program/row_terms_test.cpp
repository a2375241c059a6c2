#include "program/row_terms.h"

#include <gtest/gtest.h>

#include <string>

namespace flash_attention::program {
namespace {

/// What terms need of a row: the number of its values, a digit for each term.
std::string terms_of_text(const std::string& text, std::size_t* roots = nullptr) {
  const Program program = parse(text);
  std::string found;
  for (const RowTerm& term : row_terms(program.nodes, program.visible)) {
    found += std::to_string(term.row_values.size());
    if (roots != nullptr) *roots += term.roots.size();
  }
  return found;
}

TEST(ProgramRowTerms, AreWhatNeedsTheSameOfARow) {
  // two axes of an image; a key alone; a row alone
  EXPECT_EQ(terms_of_text("x = mod i 9\nu = mod j 9\ny = floordiv i 9\nv = floordiv j 9\np = eq x u\nq = eq y v\n"
                          "z = and p q\nvisible = z"),
            "11");
  std::size_t roots = 0;
  EXPECT_EQ(terms_of_text("x = floordiv i 9\nu = floordiv j 9\np = ge x u\nq = ne u 3\nr = add x u\ns = ne r 4\n"
                          "a = and p q\nb0 = and a s\nvisible = b0",
                          &roots),
            "10");  // p and s are one term
  EXPECT_EQ(roots, 3u);
}

TEST(ProgramRowTerms, OtherLogicIsOneTerm) {
  EXPECT_EQ(terms_of_text("x = mod i 9\np = eq x j\nq = ge i j\nz = or p q\nvisible = z"), "2");
  EXPECT_EQ(terms_of_text("x = mod i 9\np = gt x 2\nq = gt i 40\nz = and p q\nvisible = z"), "1");  // known of a row
}

TEST(ProgramRowTerms, TheLastHasWhatIsLeft) {
  std::string text;
  for (int n = 0; n < 6; ++n) {
    const std::string number = std::to_string(n);
    text += "x" + number + " = floordiv i " + std::to_string(n + 2) + "\np" + number + " = ne x" + number + " j\n";
  }
  for (int n = 1; n < 6; ++n) {
    const std::string before = n == 1 ? "p0" : "a" + std::to_string(n - 1);
    text += "a" + std::to_string(n) + " = and " + before + " p" + std::to_string(n) + "\n";
  }
  std::size_t roots = 0;
  EXPECT_EQ(terms_of_text(text + "visible = a5", &roots), "1113");
  EXPECT_EQ(roots, 6u);
}

}  // namespace
}  // namespace flash_attention::program
