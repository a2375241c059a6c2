// Which problems decode/sm80 gets, and how they are laid out.
#include <gtest/gtest.h>

#include <algorithm>
#include <array>

#include "flash_attention/plan.h"
#include "plan/kernel_config.h"

namespace flash_attention {
namespace {

DeviceInfo device_of(int arch, int num_sms, int shared_bytes) {
  return {.device = {.kind = DeviceKind::cuda}, .arch = arch, .num_sms = num_sms, .shared_bytes = shared_bytes};
}
const DeviceInfo h200 = device_of(90, 132, 232448), a100 = device_of(80, 108, 166912),
                 consumer = device_of(120, 100, 101376);

Problem one_token(std::int64_t batch, std::int64_t keys, std::int64_t head_dim = 128) {
  return {.batch = batch,
          .seq_q = 1,
          .seq_kv = keys,
          .heads_q = 32,
          .heads_kv = 8,
          .head_dim = head_dim,
          .dtype = Dtype::bfloat16,
          .seqused_kv = true};
}

int blocks_of(const Plan& plan) {
  const auto [x, y, z] = plan.launches.at(0).grid;
  return x * y * z;
}

TEST(PlanDecode, TakesFewQueries) {
  Problem problem = one_token(4, 4096);
  EXPECT_EQ(make_plan(problem, Pass::forward, h200).kernel, "decode/sm90");
  EXPECT_EQ(make_plan(problem, Pass::forward, a100).kernel, "decode/sm80");
  problem.seq_q = 16;
  EXPECT_EQ(make_plan(problem, Pass::forward, h200).kernel, "decode/sm90");
  problem.seq_q = 17;
  EXPECT_EQ(make_plan(problem, Pass::forward, h200).kernel, "forward/sm90");
  EXPECT_EQ(make_plan(problem, Pass::forward, a100).kernel, "forward/sm80");
  problem.page_size = 16, problem.num_pages = 5000;
  problem.dtype = Dtype::float32;
  EXPECT_EQ(make_plan(problem, Pass::forward, h200).kernel, "forward/tf32");
}

/// Latent keys: a block has whole items where that leaves few SMs idle.
TEST(PlanDecode, LatentItemsAreWhole) {
  Problem problem{.batch = 128, .seq_q = 1, .seq_kv = 4096, .heads_q = 16, .heads_kv = 1, .head_dim = 576};
  problem.head_dim_v = 512, problem.dtype = Dtype::bfloat16, problem.latent = problem.seqused_kv = true;
  problem.page_size = 64, problem.num_pages = 8192;
  const auto grid = [&] { return make_plan(problem, Pass::forward, h200).launches.at(0).grid; };
  EXPECT_EQ(make_plan(problem, Pass::forward, h200).kernel, "decode/mla_sm90");
  EXPECT_EQ(grid()[0], 128);
  problem.heads_q = 128;  // two tiles of rows
  EXPECT_EQ(grid()[0], 64);
  EXPECT_EQ(grid()[1], 2);
  problem.batch = 100;  // too many SMs would have nothing to do
  EXPECT_EQ(grid()[0], 66);
}

/// Prompts in pages are for the kernels of prompts, where those take them and have enough to do.
TEST(PlanDecode, YieldsPromptsInPages) {
  Problem problem = one_token(4, 4096);
  problem.seq_q = 2000, problem.page_size = 16, problem.num_pages = 5000;
  const auto kernel = [&](const DeviceInfo& device) { return make_plan(problem, Pass::forward, device).kernel; };
  EXPECT_EQ(kernel(h200), "forward/sm90");
  EXPECT_EQ(kernel(a100), "forward/sm80");
  problem.page_size = 4;  // no box of TMA
  EXPECT_EQ(kernel(h200), "forward/sm80");
  problem.page_size = 16, problem.seq_q = 16;
  EXPECT_EQ(kernel(h200), "decode/sm90");
  problem.seq_q = 64, problem.batch = 1;  // 32 tiles for 132 SMs, and half of their rows
  EXPECT_EQ(kernel(h200), "decode/sm90");
  problem.seq_q = 128;
  EXPECT_EQ(kernel(h200), "forward/sm90");
  problem.seq_q = 2000, problem.batch = 4, problem.invariant = true;
  EXPECT_EQ(kernel(h200), "forward/sm90");
  EXPECT_EQ(kernel(a100), "decode/sm80");
  problem.page_size = 4;  // no box of TMA
  EXPECT_EQ(kernel(h200), "decode/sm80");
  problem.page_size = 16;
  problem.invariant = false, problem.kv_dtype = Dtype::float8_e4m3;
  EXPECT_EQ(kernel(h200), "decode/sm80");
  problem.kv_dtype = Dtype::bfloat16, problem.packed = true, problem.total_q = 2000 + 63, problem.batch = 64;
  EXPECT_EQ(kernel(h200), "forward/sm90");
  problem.total_q = 512 + 63, problem.seq_q = 512;  // nearly all sequences have one query
  EXPECT_EQ(kernel(h200), "decode/sm90");
  problem.kv_dtype.reset();
  EXPECT_EQ(make_plan(problem, Pass::forward, h200, "forward/sm90").kernel, "forward/sm90");
  problem.total_q = 8000, problem.seq_q = 2000;
  EXPECT_EQ(make_plan(problem, Pass::forward, h200, "decode/sm80").kernel, "decode/sm80");
}

/// At most two blocks an SM, two parts of a result for each, and nothing that would have to be set to 0.
TEST(PlanDecode, IsOneLaunchWithoutMemset) {
  for (const DeviceInfo& device : {h200, a100, consumer}) {
    for (const std::int64_t head_dim : {64, 80, 128, 192, 256}) {
      for (const std::int64_t queries : {1, 4, 16}) {
        Problem problem = one_token(3, 5000, head_dim);
        problem.seq_q = queries;
        SCOPED_TRACE(to_string(problem) + " on " + std::to_string(device.arch));
        const Plan plan = make_plan(problem, Pass::forward, device);
        EXPECT_EQ(plan.kernel, device.arch == 90 ? "decode/sm90" : "decode/sm80");
        ASSERT_EQ(plan.launches.size(), 1u);
        EXPECT_LE(plan.launches[0].grid[0], 2 * device.num_sms);
        EXPECT_LE(plan.launches[0].shared_bytes, device.shared_bytes);
        EXPECT_EQ(plan.zeroed_bytes, 0u);
        const auto part_bytes = static_cast<std::size_t>(plan.block_q) * static_cast<std::size_t>(head_dim + 2) * 4;
        EXPECT_GE(plan.workspace_bytes, static_cast<std::size_t>(plan.launches[0].grid[0]) * (8 + 2 * part_bytes));
      }
    }
  }
}

/// The largest tiles of which two stages fit, also where they leave SMs without work: fewer parts are to be merged.
TEST(PlanDecode, TilesAreAsLargeAsTwoStagesAllow) {
  EXPECT_EQ(make_plan(one_token(64, 4096), Pass::forward, h200).block_kv, 128);
  EXPECT_EQ(make_plan(one_token(1, 1024), Pass::forward, h200).block_kv, 128);
  EXPECT_EQ(blocks_of(make_plan(one_token(1, 1024), Pass::forward, h200)), 64);
  EXPECT_EQ(make_plan(one_token(64, 4096, 256), Pass::forward, h200).block_kv, 64);
  EXPECT_LT(make_plan(one_token(64, 4096, 128), Pass::forward, consumer).block_kv, 128);
}

/// Boxes are tiles, or pages that a tile has a whole number of; everything else is copied row by row.
TEST(PlanDecode, TmaTakesPagesThatAreBoxes) {
  const auto kernel_of = [](std::int64_t page_size, std::int64_t keys) {
    Problem problem = one_token(4, keys);
    problem.page_size = page_size, problem.num_pages = 5000;
    return make_plan(problem, Pass::forward, h200).kernel;
  };
  for (const std::int64_t page_size : {8, 16, 32, 64, 128, 256, 384}) EXPECT_EQ(kernel_of(page_size, 5000), "decode/sm90");
  for (const std::int64_t page_size : {1, 4, 24, 96, 200}) EXPECT_EQ(kernel_of(page_size, 5000), "decode/sm80");
  EXPECT_EQ(kernel_of(200, 200), "decode/sm90");  // one page for a sequence
  Problem narrow = one_token(4, 4096);
  narrow.kv_dtype = Dtype::float8_e4m3, narrow.kv_scales = ScaleKind::head;
  EXPECT_EQ(make_plan(narrow, Pass::forward, h200).kernel, "decode/sm90");
  narrow.kv_scales = ScaleKind::token;
  EXPECT_EQ(make_plan(narrow, Pass::forward, h200).kernel, "decode/sm80");
}

/// Narrow heads of few rows have two blocks an SM with four warps, all others eight warps; with TMA four more that load.
/// 128 of 132 SMs have whole items.
TEST(PlanDecode, NarrowHeadsHaveTwoBlocksAnSm) {
  for (const auto& [head_dim, queries, threads, blocks] :
       {std::array{64, 1, 256, 256}, {64, 8, 384, 128}, {128, 1, 384, 128}, {256, 1, 256, 128}}) {
    Problem problem = one_token(64, 4096, head_dim);
    problem.seq_q = queries;
    const Plan plan = make_plan(problem, Pass::forward, h200);
    EXPECT_EQ(plan.launches[0].block, threads) << head_dim << " " << queries;
    EXPECT_EQ(blocks_of(plan), blocks) << head_dim << " " << queries;
  }
}

abi::ForwardConfig config_of(const Plan& plan) { return *plan::config_of<abi::ForwardConfig>(plan.launches[0]); }

/// Shares that are whole items, or equal parts of one, where nearly as many blocks have them.
TEST(PlanDecode, SharesAreEven) {
  const auto blocks = [](std::int64_t batch, std::int64_t keys) {
    return blocks_of(make_plan(one_token(batch, keys), Pass::forward, h200));
  };
  EXPECT_EQ(blocks(16, 8192), 128);   // an item each
  EXPECT_EQ(blocks(64, 4096), 128);   // four items each
  EXPECT_EQ(blocks(1, 131072), 128);  // a sixteenth of an item
  EXPECT_EQ(blocks(33, 4096), 132);   // two items each
  EXPECT_EQ(blocks(15, 8192), 132);   // 120 items: more blocks, which share some
  EXPECT_EQ(blocks(1, 1024), 64);     // no more blocks than tiles
}

/// Few items, of which none is longer than another: the blocks of each are a cluster, or would be, had the kernel one. K
/// and V of 8 bits are cut in the same places.
TEST(PlanDecode, FewItemsAreClusters) {
  const auto item_blocks = [](Problem problem, const DeviceInfo& device = h200) {
    const Plan plan = make_plan(problem, Pass::forward, device);
    const int found = config_of(plan).item_blocks;
    EXPECT_EQ(plan.launches[0].cluster, std::max(found, 1));
    if (device.arch == 90) {
      const Plan copies = make_plan(problem, Pass::forward, device, "decode/sm80");
      EXPECT_EQ(config_of(copies).item_blocks, found);
      EXPECT_EQ(copies.launches[0].cluster, 1);
      EXPECT_EQ(copies.launches[0].grid, plan.launches[0].grid);
    }
    problem.kv_dtype = Dtype::float8_e4m3, problem.kv_scales = ScaleKind::head;
    EXPECT_EQ(config_of(make_plan(problem, Pass::forward, device)).item_blocks, found);
    return found;
  };
  EXPECT_EQ(item_blocks(one_token(1, 8192)), 8);
  EXPECT_EQ((make_plan(one_token(1, 8192), Pass::forward, h200).launches[0].grid), (std::array{8, 8, 1}));
  EXPECT_EQ(item_blocks(one_token(1, 16384)), 0);  // all SMs are faster
  EXPECT_EQ(item_blocks(one_token(1, 256)), 2);    // no more than tiles
  EXPECT_EQ(item_blocks(one_token(1, 128)), 1);
  EXPECT_EQ(item_blocks(one_token(1, 8192), a100), 0);
  Problem problem = one_token(8, 8192);
  EXPECT_EQ(item_blocks(problem), 0);             // lengths are on the device
  EXPECT_EQ(item_blocks(one_token(4, 1024)), 2);  // of short items
  EXPECT_EQ(item_blocks(one_token(8, 1024)), 1);  // enough of them
  Problem narrow = one_token(8, 8192, 64);
  narrow.heads_q = 64, narrow.heads_kv = 4;
  EXPECT_EQ(item_blocks(narrow), 0);
  narrow.seqused_kv = false;
  EXPECT_EQ(item_blocks(narrow), 6);
  narrow.seq_kv = 32768;
  EXPECT_EQ(item_blocks(narrow), 0);
  problem.seqused_kv = false;
  EXPECT_EQ(item_blocks(problem), 2);
  problem.batch = 16;  // one for each SM
  EXPECT_EQ(item_blocks(problem), 1);
  problem.batch = 61;
  EXPECT_EQ(item_blocks(problem), 0);
  problem.batch = 1, problem.invariant = true;
  EXPECT_EQ(item_blocks(problem), 0);
}

/// Rows of an item: 16 where tiles of keys are few and each SM has an item, 32 where few SMs would have one, else 64.
TEST(PlanDecode, RowsOfAnItemFollowTheKeys) {
  const auto rows = [](std::int64_t batch, std::int64_t keys, std::int64_t group, const DeviceInfo& device = h200) {
    Problem problem = one_token(batch, keys);
    problem.heads_q = 4 * group, problem.heads_kv = 4, problem.seq_q = 4;
    return make_plan(problem, Pass::forward, device).block_q;
  };
  EXPECT_EQ(rows(8, 1024, 16), 16);
  EXPECT_EQ(rows(4, 1024, 16), 32);
  EXPECT_EQ(rows(16, 4096, 16), 64);
  EXPECT_EQ(rows(1, 32768, 16), 32);
  EXPECT_EQ(rows(64, 2048, 16), 64);
  EXPECT_EQ(rows(64, 2048, 8), 32);
  EXPECT_EQ(rows(64, 2048, 2), 8);
  EXPECT_EQ(rows(8, 1024, 16, a100), 64);
}

/// What is read once leaves L2 first, where it is not much; not pages, which sequences may share, nor what several tiles of
/// rows read.
TEST(PlanDecode, ReadsOnceWhatNoOtherItemReads) {
  const auto once = [](const Problem& problem) { return config_of(make_plan(problem, Pass::forward, h200)).read_once; };
  Problem problem = one_token(4, 8192);  // 134 MB
  EXPECT_TRUE(once(problem));
  problem.k_strides = problem.v_strides = {.batch = 0, .seq = 1024, .head = 128};
  EXPECT_FALSE(once(problem));
  problem = one_token(1, 8192, 256);
  EXPECT_TRUE(once(problem));
  problem.seq_q = 8;  // 32 rows
  EXPECT_FALSE(once(problem));
  EXPECT_FALSE(once(one_token(8, 8192)));
  problem = one_token(4, 8192);
  problem.page_size = 64, problem.num_pages = 5000;
  EXPECT_FALSE(once(problem));
  problem.batch = 1;
  EXPECT_TRUE(once(problem));
}

/// Where lengths are on the device, the blocks of a key head share its tiles: those of other heads read the same keys
/// meanwhile.
TEST(PlanDecode, SharesOutBlocksAmongHeads) {
  Problem problem = one_token(64, 4096);
  const auto grid = [&](const char* kernel = "decode/sm90") {
    return make_plan(problem, Pass::forward, h200, kernel).launches.at(0).grid;
  };
  EXPECT_EQ(grid(), (std::array{16, 8, 1}));
  EXPECT_EQ(grid("decode/sm80"), (std::array{16, 8, 1}));
  problem.invariant = true;
  EXPECT_EQ(grid()[1], 1);
  problem.invariant = false, problem.heads_kv = 16;  // 132 blocks
  problem.batch = 61;
  EXPECT_EQ(grid()[1], 1);
  problem = one_token(64, 4096);
  problem.seqused_kv = false;  // whole items, apart
  EXPECT_EQ(grid()[1], 1);
}

/// 64 KB are on their way to an SM at a time, 128 KB where other heads are not read side by side; all stages where SMs or
/// keys are few.
/// Two blocks of an SM have smaller tiles, if every SM has many items that are alike.
TEST(PlanDecode, ManyItemsHaveSmallTiles) {
  const auto keys = [](Problem problem) { return make_plan(problem, Pass::forward, h200).block_kv; };
  Problem problem = one_token(256, 1024);
  EXPECT_EQ(keys(problem), 128) << "lengths may differ";
  problem.seqused_kv = false;
  EXPECT_EQ(keys(problem), 64);
  EXPECT_EQ(blocks_of(make_plan(problem, Pass::forward, h200)), 256);
  problem.kv_dtype = Dtype::float8_e4m3;
  EXPECT_EQ(keys(problem), 64) << "the same bits need the same tiles";
  problem.kv_dtype.reset();
  problem.batch = 64;
  EXPECT_EQ(keys(problem), 128) << "four items for each SM";
  problem.batch = 256, problem.seq_q = 4;
  EXPECT_EQ(keys(problem), 128) << "16 rows";
}

TEST(PlanDecode, LimitsTheTilesInFlight) {
  const auto tiles = [](const Problem& problem, const char* kernel = "decode/sm90") {
    return config_of(make_plan(problem, Pass::forward, h200, kernel)).tiles_in_flight;
  };
  Problem problem = one_token(64, 4096);
  EXPECT_EQ(tiles(problem), 1);
  EXPECT_EQ(tiles(problem, "decode/sm80"), 0);
  problem.kv_dtype = Dtype::float8_e4m3;  // tiles of half the bytes
  EXPECT_EQ(tiles(problem), 2);
  problem = one_token(64, 4096, 64);  // two blocks an SM
  EXPECT_EQ(tiles(problem), 1);
  EXPECT_EQ(tiles(one_token(64, 4096, 256)), 1);
  problem = one_token(64, 4096);
  problem.page_size = 64, problem.num_pages = 5000;
  EXPECT_EQ(tiles(problem), 1);
  problem.heads_q = 4, problem.heads_kv = 1;
  EXPECT_EQ(tiles(problem), 2);
  EXPECT_EQ(tiles(one_token(1, 8192)), 0);
  problem = one_token(1, 128, 256);
  problem.seq_q = 8;  // two tiles of rows read the same keys
  EXPECT_EQ(tiles(problem), 0);
  problem.batch = 64;
  EXPECT_EQ(tiles(problem), 1);
}

/// A block's items are far apart where all are whole, and the host knows that.
TEST(PlanDecode, WholeItemsAreFarApart) {
  Problem problem = one_token(64, 4096);
  EXPECT_FALSE(config_of(make_plan(problem, Pass::forward, h200)).strided_items);  // lengths are on the device
  problem.seqused_kv = false;
  EXPECT_TRUE(config_of(make_plan(problem, Pass::forward, h200)).strided_items);
  EXPECT_TRUE(config_of(make_plan(problem, Pass::forward, h200, "decode/sm80")).strided_items);
  problem.batch = 16;  // one for each block
  EXPECT_FALSE(config_of(make_plan(problem, Pass::forward, h200)).strided_items);
  problem.batch = 61;
  EXPECT_FALSE(config_of(make_plan(problem, Pass::forward, h200)).strided_items);
  problem.batch = 64, problem.invariant = true;
  EXPECT_FALSE(config_of(make_plan(problem, Pass::forward, h200)).strided_items);
}

/// Warps take tiles in turn where runs are long, of 8-bit keys as of others: the bits are the same.
TEST(PlanDecode, TilesInTurnFollowTheShapeAlone) {
  const auto groups = [](Problem problem, const char* kernel = "") {
    const int found = config_of(make_plan(problem, Pass::forward, h200, kernel)).key_groups;
    problem.kv_dtype = Dtype::float8_e4m3, problem.kv_scales = ScaleKind::head;
    EXPECT_EQ(config_of(make_plan(problem, Pass::forward, h200, kernel)).key_groups, found);
    return found;
  };
  EXPECT_EQ(groups(one_token(1, 131072)), 2);
  EXPECT_EQ(groups(one_token(1, 131072), "decode/sm80"), 2);
  EXPECT_EQ(groups(one_token(1, 32768)), 1);  // runs of 16 tiles
  EXPECT_EQ(groups(one_token(64, 4096)), 1);
  Problem problem = one_token(1, 131072);
  EXPECT_EQ(config_of(make_plan(problem, Pass::forward, a100)).key_groups, 1);
  problem.invariant = true;
  EXPECT_EQ(groups(problem), 1);
}

/// Items of one tile have smaller ones, of which two blocks fit; with 16 rows four warps leave room for a third stage.
TEST(PlanDecode, ShortItemsHaveTwoBlocksAnSm) {
  const Plan small = make_plan(one_token(64, 128), Pass::forward, h200);
  EXPECT_EQ(small.block_kv, 64);
  EXPECT_EQ(blocks_of(small), 256);
  EXPECT_EQ(make_plan(one_token(1, 128), Pass::forward, h200).block_kv, 128);
  Problem rows = one_token(64, 1024);
  rows.heads_q = 128;
  const abi::ForwardConfig config = config_of(make_plan(rows, Pass::forward, h200));
  EXPECT_EQ(config.block_q, 16);
  EXPECT_EQ(config.num_warps, 4);
  EXPECT_EQ(config.num_stages, 3);
}

/// The plan follows capacities, never lengths: a captured launch serves all of them.
TEST(PlanDecode, AnotherCapacityOfTheSameTilesIsTheSameKernel) {
  const Plan small = make_plan(one_token(64, 4096), Pass::forward, h200),
             large = make_plan(one_token(64, 8192), Pass::forward, h200);
  EXPECT_EQ(small.launches[0].config, large.launches[0].config);
}

}  // namespace
}  // namespace flash_attention
