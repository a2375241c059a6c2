#include "program/classes.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <bit>
#include <cstdlib>
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
                ASSERT_TRUE(range.reals.may_be_nan || (value >= range.reals.lo && value <= range.reals.hi)) << where;
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

/// How many tiles of 64 x 64 the pairs hide and show altogether, and how many of them the classes know.
struct Counted {
  int hidden = 0, known_hidden = 0, full = 0, known_full = 0;
};

template <class Visible>
Counted count_tiles(const char* text, const std::vector<int>& scalars, Visible visible) {
  const program::Program parsed = program::parse(text);
  std::vector<float> numbers;
  for (const int scalar : scalars) numbers.push_back(std::bit_cast<float>(scalar));
  const program::Classes classes(parsed.nodes, {}, {}, numbers);
  constexpr int tile = 64, size = 1000;
  Counted counted;
  for (int i = 0; i < size; i += tile) {
    for (int j = 0; j < size; j += tile) {
      const int i_end = std::min(i + tile, size), j_end = std::min(j + tile, size);
      bool some = false, all = true;
      for (int row = i; row < i_end; ++row) {
        for (int key = j; key < j_end; ++key) (visible(row, key) ? some : all) = visible(row, key);
      }
      const abi::interval::Bools seen = classes.of(parsed.visible, {0, 1, 0, 1, i, i_end, j, j_end});
      EXPECT_TRUE((seen.can_be_true || !some) && (seen.can_be_false || all)) << text << i << ", " << j;
      counted.hidden += !some, counted.known_hidden += !seen.can_be_true;
      counted.full += all, counted.known_full += !seen.can_be_false;
    }
  }
  return counted;
}

// Quotients and remainders of all that 32 bits hold, by what has either sign, lie in the intervals that are said.
TEST(ProgramClasses, QuotientsAtTheEndsOf32Bits) {
  using abi::interval::Ints;
  const long long low = abi::interval::smallest, high = abi::interval::largest;
  const auto floor_of = [](long long x, long long y) { return x / y - (x % y != 0 && (x < 0) != (y < 0) ? 1 : 0); };
  const long long values[] = {low, low + 1, -1000003, -8, -7, -1, 0, 1, 6, 7, 1000003, high - 1, high};
  for (const long long from : values) {
    for (const long long to : values) {
      for (const long long by : values) {
        if (from > to || by == 0) continue;
        for (const long long wide : {0ll, 3ll}) {
          if (wide != 0 && (by > high - wide || (by < 0 && by + wide >= 0))) continue;
          const Ints quotient = abi::interval::floordiv(Ints{from, to}, Ints{by, by + wide});
          const Ints rest = abi::interval::mod(Ints{from, to}, Ints{by, by + wide});
          for (const long long x : {from, to, from + (to - from) / 2}) {
            const long long exact = floor_of(x, by), kept = exact > high ? low : exact;  // it goes round
            EXPECT_TRUE(quotient.lo <= kept && kept <= quotient.hi) << x << " // " << by;
            EXPECT_TRUE(rest.lo <= x - exact * by && x - exact * by <= rest.hi) << x << " % " << by;
          }
          if (from == to && wide == 0 && floor_of(from, by) <= high) {
            EXPECT_EQ(quotient.lo, quotient.hi);
          }
        }
      }
    }
  }
}

// Remainders go round inside of tiles. Their pieces are known exactly.
TEST(ProgramClasses, TilesOfRemainders) {
  const auto near = [](int x, int y, int reach) { return std::abs(x - y) <= reach; };
  const auto expect_all_known = [](const Counted& counted) {
    EXPECT_GT(counted.hidden, 60);
    EXPECT_EQ(counted.known_hidden, counted.hidden);
    EXPECT_EQ(counted.known_full, counted.full);
  };
  expect_all_known(count_tiles(  // the neighbourhood of a pixel, rows of 40
      "s0 = scalar int\nx = mod i s0\ny = floordiv i s0\nu = mod j s0\nv = floordiv j s0\np = sub x u\nq = sub y v\n"
      "r = abs p\ns = abs q\nn = le r 4\nc = le s 4\nz = and n c\nvisible = z",
      {40}, [&](int i, int j) { return near(i % 40, j % 40, 4) && near(i / 40, j / 40, 4); }));
  expect_all_known(count_tiles(  // sliding tiles of 8 x 8 in rows of 48
      "a = mod i 48\nx = floordiv a 8\ny = floordiv i 384\nb0 = mod j 48\nu = floordiv b0 8\nv = floordiv j 384\n"
      "p = sub x u\nq = sub y v\nr = abs p\ns = abs q\nn = le r 1\nc = le s 0\nz = and n c\nvisible = z",
      {}, [&](int i, int j) { return near(i % 48 / 8, j % 48 / 8, 1) && i / 384 == j / 384; }));
  expect_all_known(count_tiles(  // a film: frames of 10 x 20
      "s0 = scalar int\na = floordiv i s0\ny = mod a 10\nt = floordiv a 10\nb0 = floordiv j s0\nv = mod b0 10\n"
      "w = floordiv b0 10\nq = sub y v\ns = abs q\nc = le s 1\ne = eq t w\nz = and c e\nvisible = z",
      {20}, [&](int i, int j) { return near(i / 20 % 10, j / 20 % 10, 1) && i / 200 == j / 200; }));
  const Counted dilated = count_tiles(  // a remainder of a difference, whose period is that of no index
      "d = sub i j\nm = mod d 3\ne = eq m 0\na = abs d\nn = le a 100\nz = and e n\nvisible = z", {},
      [](int i, int j) { return (i - j) % 3 == 0 && std::abs(i - j) <= 100; });
  EXPECT_EQ(dilated.known_hidden, dilated.hidden);
}

}  // namespace
}  // namespace flash_attention::testing
