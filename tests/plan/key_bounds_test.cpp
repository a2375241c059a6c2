#include "abi/key_bounds.h"

#include <gtest/gtest.h>

#include <random>
#include <vector>

// The class of a tile against a look at each of its pairs.

namespace flash_attention {
namespace {

struct Keys {
  int count;
  std::vector<int> rows;

  Keys(std::mt19937& random, int bounds) : count(bounds) {
    const int style = static_cast<int>(random() % 3), first = static_cast<int>(random() % 300);
    for (int key = 0; key < abi::mask_unit; ++key) {
      for (int n = 0; n < bounds; ++n) {
        const int close = first + 100 * n + static_cast<int>(random() % 8);
        const int away = static_cast<int>(random() % 600) - 100;
        rows.push_back(style == 0 ? close : style == 1 ? away : random() % 16 == 0 ? away : close);
      }
    }
  }
  const int* of(int key) const { return rows.data() + key * count; }
};

/// What all pairs of the rows [first, last] say.
abi::TileClass look_at_all(const Keys& keys, int first, int last) {
  bool any = false, all = true;
  for (int key = 0; key < abi::mask_unit; ++key) {
    for (int row = first; row <= last; ++row) {
      const int* r = keys.of(key);
      const bool hidden = (keys.count == 1 && row >= r[0]) || (keys.count > 1 && row >= r[0] && row < r[1]) ||
                          (keys.count == 4 && row >= r[2] && row < r[3]);
      any = any || !hidden;
      all = all && !hidden;
      EXPECT_EQ(abi::hides(r, keys.count, row), hidden);
    }
  }
  return all ? abi::TileClass::full : any ? abi::TileClass::partial : abi::TileClass::none;
}

TEST(KeyBounds, AClassIsNeverWrongAndOftenExact) {
  std::mt19937 random(7);
  int seen[3] = {}, exact = 0, tiles = 0;
  for (int turn = 0; turn < 600; ++turn) {
    const int bounds = 1 << turn % 3, first = static_cast<int>(random() % 500);
    const Keys keys(random, bounds);
    abi::KeyBounds common = abi::no_bounds();
    for (int key = 0; key < abi::mask_unit; ++key) abi::take_key(common, keys.of(key), bounds);
    const int last = first + (turn % 2 == 0 ? 63 : 127);
    const abi::TileClass got = abi::class_of(common, first, last), want = look_at_all(keys, first, last);
    if (got != abi::TileClass::partial) {
      EXPECT_EQ(got, want) << "turn " << turn;
    }
    ++seen[static_cast<int>(got)], ++tiles, exact += got == want;
  }
  for (int count : seen) EXPECT_GT(count, 20);  // the test sees each of them
  EXPECT_GT(exact, tiles * 9 / 10);
}

TEST(KeyBounds, EmptyIntervalsHideNothing) {
  const int rows[] = {50, 40, 0, 0};
  abi::KeyBounds common = abi::no_bounds();
  abi::take_key(common, rows, 4);
  EXPECT_EQ(abi::class_of(common, 0, 63), abi::TileClass::full);
}

}  // namespace
}  // namespace flash_attention
