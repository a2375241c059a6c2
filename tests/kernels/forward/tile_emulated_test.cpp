#include "kernels/emulated.h"

// Tiles that are asked for: each that the planner lets through gives the contract's results.
namespace flash_attention::testing {
namespace {

struct Tiled {
  const char* kernel;
  int arch;
  int block_q, block_kv;
  Case problem;
};

std::string name_of(const ::testing::TestParamInfo<Tiled>& info) {
  const Tiled& t = info.param;
  return "sm" + std::to_string(t.arch) + "_" + std::to_string(t.block_q) + "x" + std::to_string(t.block_kv) + "_" +
         t.problem.name;
}

Case case_named(const std::string& name) {
  for (Case c : contract_cases(Dtype::bfloat16)) {
    if (c.name == name) return c;
  }
  throw std::logic_error("no case " + name);
}

/// Two of each kernel; in the long tail all that are allowed, with a mask that has edges on both sides.
std::vector<Tiled> tiled() {
  const Case causal = case_named("causal");
  std::vector<Tiled> all{{"forward/sm80", 80, 32, 96, causal}, {"forward/sm90", 90, 64, 32, causal}};
  if (!with_long_tail()) return all;
  all.clear();
  for (const char* name : {"causal", "window"}) {
    for (const int block_q : {32, 64, 128}) {
      for (const int block_kv : {32, 64, 96, 128}) all.push_back({"forward/sm80", 80, block_q, block_kv, case_named(name)});
    }
    for (const int block_q : {64, 128, 192}) {
      for (const int block_kv : {32, 64, 128}) all.push_back({"forward/sm90", 90, block_q, block_kv, case_named(name)});
    }
  }
  return all;
}

class AskedTile : public ::testing::TestWithParam<Tiled> {};

TEST_P(AskedTile, Emulated) {
  const Tiled& t = GetParam();
  const TileSize tile{t.block_q, t.block_kv};
  emulator::set_seed(static_cast<std::uint64_t>(1000 * tile.block_q + tile.block_kv));
  const Device device{.kind = DeviceKind::emulator, .emulated_arch = t.arch};
  EXPECT_EQ(make_plan(t.problem.problem, Pass::forward, device_info(device), t.kernel, tile).block_kv, t.block_kv);
  check(t.problem, {.device = device, .kernel = t.kernel, .pass = Pass::forward, .tile = tile});
}

INSTANTIATE_TEST_SUITE_P(, AskedTile, ::testing::ValuesIn(tiled()), name_of);

}  // namespace
}  // namespace flash_attention::testing
