// forward/sm90 where a block does more tiles than it has marks for (256): by a fixed schedule and by a counter.
#include "emulator/host/seed.h"
#include "flash_attention/attention.h"
#include "plan/kernel_config.h"
#include "support/cases/contract.h"

namespace flash_attention::testing {
namespace {

constexpr Device hopper{.kind = DeviceKind::emulator, .emulated_arch = 90};

/// Two blocks, and one of them may do nearly all of 360 tiles: what it cannot remember the other has to do.
TEST(ForwardSm90Schedule, NoTileIsLostWhereABlockHasMoreTurnsThanMarks) {
  emulator::set_num_sms(2);
  Case c;
  c.name = "many_turns";
  c.problem = {.batch = 60,
               .seq_q = 1100,
               .seq_kv = 9,
               .heads_q = 1,
               .heads_kv = 1,
               .head_dim = 8,
               .dtype = Dtype::bfloat16,
               .causal = true,
               .alignment = Alignment::top_left};
  const Plan plan = make_plan(c.problem, Pass::forward, device_info(hopper), "forward/sm90");
  ASSERT_TRUE(plan::config_of<abi::ForwardConfig>(plan.launches.back())->dynamic_scheduler);
  ASSERT_EQ(plan.launches.back().grid[0], 2);
  emulator::set_seed(1);
  check(c, {.device = hopper, .kernel = "forward/sm90", .pass = Pass::forward});
}

/// The first row tiles of a window are short: they come last, and the counter gives them to who is free. Tiles that were
/// claimed are done again by who claimed them.
TEST(ForwardSm90Schedule, TilesOfAWindowAreTakenByTheCounter) {
  emulator::set_num_sms(3);
  for (const std::int64_t head_dim : {64, 128, 256}) {
    Case c;
    c.name = "window_" + std::to_string(head_dim);
    c.draw = head_dim == 128 ? Draw::growing : Draw::normal;
    c.nan_value = head_dim == 64 ? 500 : -1;
    c.problem = {.batch = 2,
                 .seq_q = 900,
                 .seq_kv = 900,
                 .heads_q = 2,
                 .heads_kv = 1,
                 .head_dim = head_dim,
                 .dtype = Dtype::bfloat16,
                 .causal = true,
                 .window_left = 130};
    const Plan plan = make_plan(c.problem, Pass::forward, device_info(hopper), "forward/sm90");
    ASSERT_TRUE(plan::config_of<abi::ForwardConfig>(plan.launches.back())->dynamic_scheduler);
    emulator::set_seed(3);
    check(c, {.device = hopper, .kernel = "forward/sm90", .pass = Pass::forward});
  }
}

/// One block for 300 tiles, the last of which have to be done again.
TEST(ForwardSm90Schedule, TilesPastTheMarksAreDoneAgainToo) {
  emulator::set_num_sms(1);
  emulator::set_seed(5);
  Case c;
  c.name = "many_tiles";
  c.draw = Draw::growing;
  c.problem = {
      .batch = 300, .seq_q = 4, .seq_kv = 140, .heads_q = 1, .heads_kv = 1, .head_dim = 8, .dtype = Dtype::bfloat16};
  check(c, {.device = hopper, .kernel = "forward/sm90", .pass = Pass::forward});
}

}  // namespace
}  // namespace flash_attention::testing
