#include "emulator/checks/counters.h"
#include "emulator/host/seed.h"
#include "flash_attention/error.h"
#include "kernels/primer.h"

namespace flash_attention::testing {
namespace {

DeviceInfo emulated() { return device_info({DeviceKind::emulator, 0, 80}); }

TEST(Primer, AddsEveryElementAndNoOther) {
  for (const PrimerCase& primer : primer_cases()) {
    SCOPED_TRACE(primer.entry + " " + std::to_string(primer.rows) + " x " + std::to_string(primer.columns));
    const auto kernel = load_plain_kernel(primer.unit, primer.entry, emulated());
    for (const std::uint64_t seed : {1, 2}) {
      emulator::set_seed(seed);
      PrimerData data(primer);
      data.launch(*kernel, primer, data.a.data(), data.b.data(), data.c.data());
      data.expect_sums();
    }
  }
}

struct Counted {
  std::uint64_t requests, sectors;
};

/// The kernel on 64 x 64 elements that begin at a sector.
Counted count(const std::string& unit, const std::string& entry, const PlainLaunch& launch) {
  const PrimerCase primer{unit, entry, 64, 64, launch};
  PrimerData data(primer);
  struct alignas(512) Aligned {
    float values[64 * 64];
  };
  std::vector<Aligned> arrays(3);
  const auto kernel = load_plain_kernel(unit, entry, emulated());
  const bool before = emulator::count_accesses(true);
  emulator::reset_counters();
  data.launch(*kernel, primer, &arrays[0], &arrays[1], &arrays[2]);
  emulator::count_accesses(before);
  return {emulator::counters().global_requests, emulator::counters().global_sectors};
}

// 4096 elements: 128 warps of plain accesses, three each (two loads, one store).
TEST(Primer, SectorsOfARequestAreCounted) {
  const Counted simple = count("primer/vector_add_simple", "vector_add_simple", {{16, 1}, {256, 1}});
  EXPECT_EQ(simple.requests, 3 * 128);
  EXPECT_EQ(simple.sectors, 4 * simple.requests);
  const Counted wide = count("primer/vector_add", "vector_add", {{2, 1}, {256, 1}});
  EXPECT_EQ(wide.requests, 3 * 32);
  EXPECT_EQ(wide.sectors, 16 * wide.requests);
  const Counted rows = count("primer/matrix_add", "matrix_add", {{2, 8}, {32, 8}});
  EXPECT_EQ(rows.requests, 3 * 128);
  EXPECT_EQ(rows.sectors, 4 * rows.requests);
  const Counted columns = count("primer/matrix_add", "matrix_add_by_columns", {{2, 8}, {32, 8}});
  EXPECT_EQ(columns.requests, 3 * 128);
  EXPECT_EQ(columns.sectors, 32 * columns.requests);
}

TEST(Primer, IsNotForTheCpu) { EXPECT_THROW(load_plain_kernel("primer/vector_add", "vector_add", device_info({})), Error); }

TEST(Primer, ABlockThatIsNoRectangleIsRefused) {
  const PrimerCase primer{"primer/vector_add", "vector_add", 4, 4, {{1, 1}, {2048, 1}}};
  const auto kernel = load_plain_kernel(primer.unit, primer.entry, emulated());
  PrimerData data(primer);
  EXPECT_THROW(data.launch(*kernel, primer, data.a.data(), data.b.data(), data.c.data()), Error);
}

}  // namespace
}  // namespace flash_attention::testing
