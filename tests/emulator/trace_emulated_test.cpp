#include <gtest/gtest.h>

#include <algorithm>

#include "emulator/checks/counters.h"
#include "emulator/trace/timeline.h"
#include "flash_attention/error.h"
#include "kernels/emulated.h"

// What the emulator records of a block, and the model that lays it out in time.
namespace flash_attention::testing {
namespace {

using namespace flash_attention::emulator;

struct Sums {
  double wgmma_flops = 0, mma_flops = 0, fma_flops = 0, bulk_bytes = 0;
};

Sums sums_of(const std::vector<LaunchRecord>& launches) {
  Sums sums;
  const auto add = [&](const Work& work) {
    sums.mma_flops += static_cast<double>(work.mma_flops), sums.fma_flops += 2.0 * static_cast<double>(work.fma);
  };
  for (const LaunchRecord& launch : launches) {
    for (const BlockRecord& block : launch.blocks) {
      for (std::size_t w = 0; w < block.warps.size(); ++w) {
        add(block.warps[w].after);
        for (const Event& event : block.warps[w].events) {
          add(event.before);
          if (event.kind == EventKind::wgmma) sums.wgmma_flops += 2.0 * 16 * 16 * event.amount;
          if (event.kind == EventKind::bulk_load || event.kind == EventKind::bulk_store) sums.bulk_bytes += event.amount;
        }
      }
    }
  }
  return sums;
}

struct Traced {
  const char* kernel;
  int arch;
  Pass pass;
  const char* problem;
};
void PrintTo(const Traced& traced, std::ostream* stream) { *stream << traced.kernel << ' ' << traced.problem; }

class Trace : public ::testing::TestWithParam<Traced> {
 protected:
  /// Every block of every launch; the results are compared with fp64 as in all tests.
  static std::vector<LaunchRecord> record_all(std::uint64_t seed) {
    const Traced& traced = GetParam();
    std::vector<Case> cases = contract_cases(Dtype::bfloat16);
    for (const Case& c : cache_cases(Dtype::bfloat16)) cases.push_back(c);
    for (const Case& c : cases) {
      if (c.name != traced.problem) continue;
      set_seed(seed);
      set_num_sms(3);
      reset_counters();
      start_recording({.clusters = 1 << 20});
      check(c, {.device = {.kind = DeviceKind::emulator, .emulated_arch = traced.arch},
                .kernel = traced.kernel,
                .pass = traced.pass});
      return stop_recording();
    }
    ADD_FAILURE() << "there is no case " << traced.problem;
    return {};
  }
};

/// What was recorded is what was counted, whatever the schedule was.
TEST_P(Trace, LosesNothing) {
  for (const std::uint64_t seed : {1, 2, 3}) {
    const Sums sums = sums_of(record_all(seed));
    const Counters counted = counters();
    EXPECT_EQ(sums.wgmma_flops, static_cast<double>(counted.wgmma_flops));
    EXPECT_EQ(sums.mma_flops, static_cast<double>(counted.mma_flops));
    EXPECT_EQ(sums.fma_flops, static_cast<double>(counted.fma_flops));
    EXPECT_EQ(sums.bulk_bytes, static_cast<double>(counted.bulk_bytes));
  }
}

/// Every record of a run that ended can be laid out, and no unit does more than the time allows.
TEST_P(Trace, IsLaidOut) {
  const Machine machine = machine_of(GetParam().arch, 3);
  for (const LaunchRecord& launch : record_all(4)) {
    const auto size = static_cast<std::size_t>(launch.cluster);
    for (std::size_t i = 0; i < launch.clusters.size(); ++i) {
      const Timeline timeline = lay_out({launch.blocks.data() + i * size, size}, machine, share_of(launch, machine));
      for (const double busy : timeline.busy) EXPECT_LE(busy, timeline.clocks * 1.0001) << launch.unit;
      for (const Span& span : timeline.warps) EXPECT_LE(span.begin, span.end);
      EXPECT_LE(timeline.waiting, 1.0);
    }
    EXPECT_GT(predict(launch, machine).seconds, machine.launch_s);
  }
}

INSTANTIATE_TEST_SUITE_P(Kernels, Trace,
                         ::testing::Values(Traced{"forward/sm90", 90, Pass::forward, "causal_square"},
                                           Traced{"forward/sm80", 80, Pass::forward, "head_dim_128"},
                                           Traced{"decode/sm90", 90, Pass::forward, "paged_causal"},
                                           Traced{"backward/sm90", 90, Pass::backward, "plain"}));

// Records made by hand, of which the time is known.

constexpr Machine round_machine{.name = "round",
                                .clock_ghz = 1,
                                .num_sms = 1,
                                .wgmma_flops = 4096,
                                .mma_flops = 2048,
                                .special = 16,
                                .fma = 128,
                                .issue = 4,
                                .shared_bytes = 128,
                                .l2_bytes = 64,
                                .l2_bytes_of_all = 64,
                                .memory_bytes_s = 1e12,
                                .matrix_flops_s = 1e15,
                                .load_latency = 500,
                                .bulk_latency = 600,
                                .wgmma_latency = 30,
                                .barrier_latency = 40,
                                .mbarrier_latency = 50,
                                .launch_s = 0};

double clocks_of(std::vector<WarpRecord> warps) {
  const BlockRecord block{.index = {}, .warps = std::move(warps)};
  return lay_out({&block, 1}, round_machine, {}).clocks;
}

/// 256 exponentials on a quarter of 16 a clock, then a barrier of two warps.
TEST(TraceModel, WaitsForTheOtherWarp) {
  const Event sync{.kind = EventKind::barrier_sync, .place = {0, 1}, .number = 0};
  Event late = sync;
  late.before.special = 256;
  EXPECT_DOUBLE_EQ(clocks_of({{.events = {late}, .after = {}}, {.events = {sync}, .after = {}}}), 64 + 40);
}

/// Warps of one scheduler share its units; those of two do not.
TEST(TraceModel, SharesUnits) {
  const WarpRecord busy{.events = {}, .after = {.special = 256}};
  EXPECT_DOUBLE_EQ(clocks_of({busy, busy}), 64);
  EXPECT_DOUBLE_EQ(clocks_of({busy, {}, {}, {}, busy}), 128);
}

/// A copy of 6400 bytes takes 100 clocks from L2, then its latency; the wait takes the mbarrier's.
TEST(TraceModel, CopiesCompleteAPhase) {
  const Event load{.kind = EventKind::bulk_load, .place = {0, 4096}, .number = 0, .amount = 6400, .barrier = 8};
  const Event wait{.kind = EventKind::mbarrier_wait, .place = {0, 8}, .number = 0};
  EXPECT_DOUBLE_EQ(clocks_of({{.events = {load}, .after = {}}, {.events = {wait}, .after = {}}}), 100 + 600 + 50);
  const Event first{.kind = EventKind::mbarrier_wait, .place = {0, 8}, .number = -1};  // passes at once
  EXPECT_DOUBLE_EQ(clocks_of({{.events = {first}, .after = {}}}), 0);
}

/// Two products of 64 columns, one after the other: 32 clocks each.
TEST(TraceModel, ProductsQueue) {
  const auto product = [](std::int64_t number) { return Event{.kind = EventKind::wgmma, .number = number, .amount = 64}; };
  const Event commit{.kind = EventKind::wgmma_commit}, wait{.kind = EventKind::wgmma_wait};
  const WarpRecord warp{.events = {product(1), product(2), commit, wait}, .after = {}};
  EXPECT_DOUBLE_EQ(clocks_of({warp, warp, warp, warp}), 64 + 30);
}

/// A wait that nobody serves is told with the warp and the event, not laid out as if it passed.
TEST(TraceModel, AWaitForNobodyIsAnError) {
  const Event wait{.kind = EventKind::mbarrier_wait, .place = {0, 24}, .number = 0};
  try {
    clocks_of({{.events = {wait}, .after = {}}});
    FAIL() << "laid out";
  } catch (const Error& error) {
    EXPECT_NE(std::string(error.what()).find("block 0, warp 0, event 0: mbarrier.wait at 24, number 0"), std::string::npos)
        << error.what();
  }
}

TEST(TraceModel, EveryRateHasASource) {
  for (const int arch : {80, 90}) {
    for (const Rate& rate : machine_of(arch).rates()) {
      EXPECT_GT(rate.value, 0) << rate.name;
      EXPECT_NE(std::string(rate.source), "") << rate.name;
    }
  }
  EXPECT_DOUBLE_EQ(machine_of(90, 66).l2_bytes_of_all * 2, machine_of(90).l2_bytes_of_all);
  EXPECT_THROW(machine_of(75), Error);
}

}  // namespace
}  // namespace flash_attention::testing
