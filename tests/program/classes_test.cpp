#include "program/classes.h"

#include <gtest/gtest.h>

#include <bit>
#include <random>

#include "support/cases/programs.h"

namespace flash_attention::testing {
namespace {

program::Classes classes_of(const RandomProgram& random) {
  std::vector<program::HostTensor> tensors{{random.reals.data(), {11}}, {random.ints.data(), {3, 17}}};
  return {random.parsed.nodes,
          random.parsed.tensors,
          tensors,
          {std::bit_cast<float>(static_cast<std::int32_t>(random.scalars[0])), static_cast<float>(random.scalars[1])}};
}

// Every value that a program takes in a tile lies in the interval that is claimed for it.
TEST(ProgramClasses, HoldWhatOccurs) {
  int decided = 0;
  for (unsigned seed = 0; seed < 300; ++seed) {
    const RandomProgram random(seed, false);
    const program::Classes classes = classes_of(random);
    std::mt19937 engine(seed);
    const auto below = [&](unsigned count) { return static_cast<std::int64_t>(engine() % count); };
    for (int tile = 0; tile < 3; ++tile) {
      const std::int64_t i = below(40), j = below(40), b = below(2), h = below(3);
      const program::Area area{b, b + 1, h, h + 1 + below(2), i, i + 1 + below(7), j, j + 1 + below(9)};
      std::vector<program::Range> ranges;
      classes.ranges(area, ranges);
      const auto& seen = ranges[static_cast<std::size_t>(random.parsed.visible)].bools;
      decided += seen.can_be_true != seen.can_be_false;
      for (std::int64_t head = area.h_begin; head < area.h_end; ++head) {
        for (std::int64_t row = area.i_begin; row < area.i_end; ++row) {
          for (std::int64_t key = area.j_begin; key < area.j_end; ++key) {
            for (int n = 0; n < static_cast<int>(ranges.size()); ++n) {
              const program::Node& node = random.parsed.nodes[static_cast<std::size_t>(n)];
              const program::Range& range = ranges[static_cast<std::size_t>(n)];
              const double value = random.value(n, 0, b, head, row, key);
              const std::string where = random.text + "line " + std::to_string(node.line);
              if (node.type == program::Type::integer) {
                ASSERT_TRUE(value >= range.ints.lo && value <= range.ints.hi) << where;
              } else if (node.type == program::Type::real) {
                ASSERT_TRUE(range.reals.odd || (value >= range.reals.lo && value <= range.reals.hi)) << where;
              } else {
                ASSERT_TRUE(value != 0 ? range.bools.can_be_true : range.bools.can_be_false) << where;
              }
            }
          }
        }
      }
    }
  }
  EXPECT_GT(decided, 200);  // and it is not always "unknown"
}

TEST(ProgramClasses, TilesOfKnownMasks) {
  const auto of = [](const char* text, const program::Area& area) {
    const program::Program parsed = program::parse(text);
    return program::Classes(parsed.nodes, {}, {}, {}).of(parsed.visible, area);
  };
  const auto is = [](abi::interval::Bools seen, bool can_be_true, bool can_be_false) {
    return seen.can_be_true == can_be_true && seen.can_be_false == can_be_false;
  };
  const char* const causal = "v = ge i j\nvisible = v";
  EXPECT_TRUE(is(of(causal, {0, 1, 0, 1, 64, 128, 0, 64}), true, false));
  EXPECT_TRUE(is(of(causal, {0, 1, 0, 1, 63, 127, 0, 64}), true, false));  // the corner (63, 63) is visible
  EXPECT_TRUE(is(of(causal, {0, 1, 0, 1, 62, 126, 0, 64}), true, true));
  EXPECT_TRUE(is(of(causal, {0, 1, 0, 1, 0, 64, 64, 128}), false, true));
  EXPECT_TRUE(is(of(causal, {0, 1, 0, 1, 0, 65, 64, 128}), true, true));
  const char* const window = "a = ge i j\nd = sub i j\nc = le d 100\nv = and a c\nvisible = v";
  EXPECT_TRUE(is(of(window, {0, 1, 0, 1, 256, 320, 0, 128}), false, true));
  EXPECT_TRUE(is(of(window, {0, 1, 0, 1, 256, 320, 220, 256}), true, false));
  const char* const tiles = "x = floordiv i 64\ny = floordiv j 64\nv = eq x y\nvisible = v";
  EXPECT_TRUE(is(of(tiles, {0, 1, 0, 1, 64, 128, 64, 128}), true, false));
  EXPECT_TRUE(is(of(tiles, {0, 1, 0, 1, 64, 128, 128, 192}), false, true));
}

}  // namespace
}  // namespace flash_attention::testing
