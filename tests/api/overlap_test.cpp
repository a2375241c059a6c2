#include "api/checks/overlap.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <random>
#include <set>
#include <vector>

namespace flash_attention::api {
namespace {

std::set<std::intptr_t> elements(const Extent& e) {
  std::set<std::intptr_t> all;
  for (std::int64_t a = 0; a < e.sizes[0]; ++a)
    for (std::int64_t b = 0; b < e.sizes[1]; ++b)
      for (std::int64_t c = 0; c < e.sizes[2]; ++c)
        for (std::int64_t d = 0; d < e.sizes[3]; ++d)
          all.insert(reinterpret_cast<std::intptr_t>(e.data) +
                     (a * e.strides[0] + b * e.strides[1] + c * e.strides[2] + d * e.strides[3]) * e.element_bytes);
  return all;
}

bool share(const Extent& a, const Extent& b) {
  const auto x = elements(a), y = elements(b);
  return std::any_of(x.begin(), x.end(), [&](std::intptr_t p) { return y.contains(p); });
}

TEST(Overlap, QkvInOneBufferDoesNotOverlap) {
  std::vector<char> memory(2 * 3 * 3 * 4 * 8 * 2);
  const auto part = [&](int which) {
    return Extent{"", memory.data() + which * 4 * 8 * 2, 2, {2, 3, 4, 8}, {3 * 3 * 4 * 8, 3 * 4 * 8, 8, 1}};
  };
  EXPECT_FALSE(overlaps(part(0), part(1)));
  EXPECT_FALSE(overlaps(part(0), part(2)));
  EXPECT_TRUE(overlaps(part(1), part(1)));
}

/// Frameworks give an axis of size 1 any stride; q, k and v of one buffer stay apart whatever it is.
TEST(Overlap, TheStrideOfAnAxisOfOneMeansNothing) {
  std::vector<char> memory(3 * 3 * 4 * 8 * 2);
  for (const std::int64_t batch : {0, 1, 5, 8, 40, 96, 97, 1000, -7}) {
    const auto part = [&](int which) {
      return Extent{"", memory.data() + which * 4 * 8 * 2, 2, {1, 3, 4, 8}, {batch, 3 * 4 * 8, 8, 1}};
    };
    EXPECT_FALSE(overlaps(part(0), part(1))) << batch;
    EXPECT_FALSE(overlaps(part(2), part(0))) << batch;
    Extent later = part(0);
    later.data += 2 * 3 * 4 * 8 * 2 + 2;  // the second element of the third row
    later.sizes[1] = 1;
    EXPECT_TRUE(overlaps(part(0), later)) << batch;
  }
}

TEST(Overlap, AgreesWithCountingElements) {
  std::mt19937 random(7);
  std::vector<char> memory(1 << 16);
  int shared = 0;
  for (int round = 0; round < 4000; ++round) {
    const auto size = [&](int most) { return static_cast<std::int64_t>(random() % most + 1); };
    const std::int64_t dim = 8, heads = size(3), rows = size(4), batch = size(2);
    const std::int64_t head = dim * size(3), row = head * (heads + random() % 3), whole = row * (rows + random() % 2);
    Extent a{"a", memory.data() + 20000, 2, {batch, rows, heads, dim}, {whole, row, head, 1}};
    Extent b = a;
    b.data += 2 * static_cast<std::int64_t>(random() % 400) - 400;
    if (random() % 2) b.sizes[2] = size(static_cast<int>(heads));
    shared += share(a, b);
    EXPECT_EQ(overlaps(a, b), share(a, b)) << round;
  }
  EXPECT_GT(shared, 500);
  EXPECT_LT(shared, 3800);
}

TEST(Overlap, AgreesWithCountingElementsWhateverTheSigns) {
  std::mt19937 random(11);
  std::vector<char> memory(1 << 16);
  int shared = 0, apart_in_range = 0;
  for (int round = 0; round < 6000; ++round) {
    const auto size = [&](int most) { return static_cast<std::int64_t>(random() % most + 1); };
    const auto sign = [&] { return random() % 2 ? 1 : -1; };
    const std::int64_t dim = 4, heads = size(3), rows = size(4), batch = size(3);
    const std::int64_t head = dim * size(3), row = head * (heads + random() % 3), whole = row * (rows + random() % 2);
    Extent a{"a", memory.data() + 30000, 2, {batch, rows, heads, dim}, {sign() * whole, sign() * row, sign() * head, 1}};
    Extent b = a;
    for (int axis = 0; axis < 3; ++axis) {
      if (random() % 3 == 0) b.sizes[axis] = size(4);
    }
    if (random() % 4 == 0) std::swap(a.strides[0], a.strides[1]), std::swap(b.strides[0], b.strides[1]);
    b.data += 2 * (static_cast<std::int64_t>(random() % 400) - 200);
    ASSERT_TRUE(!share(a, b) || (overlaps(a, b) && overlaps(b, a))) << "missed in round " << round;
    shared += share(a, b);
    apart_in_range += !overlaps(a, b);
    ASSERT_TRUE(a.sizes != b.sizes || a.strides[0] != whole || overlaps(a, b) == share(a, b)) << round;
  }
  EXPECT_GT(shared, 500);
  EXPECT_GT(apart_in_range, 500);
}

TEST(Overlap, AxesThatDoNotNestAreNeverMissed) {
  std::mt19937 random(13);
  std::vector<char> memory(1 << 16);
  int shared = 0;
  for (int round = 0; round < 6000; ++round) {
    const auto extent = [&] {
      Extent e{"e", memory.data() + 30000 + 4 * (random() % 64), 4, {}, {}};
      for (int axis = 0; axis < 4; ++axis) {
        e.sizes[axis] = static_cast<std::int64_t>(random() % 4) + 1;
        e.strides[axis] = static_cast<std::int64_t>(random() % 23) - 11;
      }
      return e;
    };
    const Extent a = extent();
    Extent b = extent();
    if (random() % 2) b.strides = a.strides;
    shared += share(a, b);
    ASSERT_TRUE(!share(a, b) || overlaps(a, b)) << round;
  }
  EXPECT_GT(shared, 500);
}

TEST(Overlap, NothingSharesWithNothing) {
  const Extent none{"none", nullptr, 2, {1, 1, 1, 8}, {0, 0, 0, 1}};
  char byte[16];
  const Extent empty{"empty", byte, 2, {0, 1, 1, 8}, {0, 0, 0, 1}};
  EXPECT_FALSE(overlaps(none, none));
  EXPECT_FALSE(overlaps(empty, empty));
}

}  // namespace
}  // namespace flash_attention::api
