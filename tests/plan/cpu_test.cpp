#include <gtest/gtest.h>

#include <array>

#include "flash_attention/plan.h"
#include "plan/kernel_table.h"

namespace flash_attention {
namespace {

DeviceInfo cpu_with(CpuIsa isa, int threads) {
  DeviceInfo device;
  device.isa = isa;
  device.threads = threads;
  return device;
}

/// Tensors of the call: q, k, v, out and their gradients.
std::int64_t tensor_bytes(const Problem& p) {
  return 8 * p.total_q * p.heads_q * p.head_dim * static_cast<std::int64_t>(size_of(p.dtype));
}

TEST(CpuPlan, PackedSequencesNeedNoMoreThanTheirRows) {
  for (const CpuIsa isa : {CpuIsa::generic, CpuIsa::avx512_bf16, CpuIsa::amx}) {
    for (const Dtype dtype : {Dtype::float32, Dtype::bfloat16}) {
      Problem p{.batch = 400, .heads_q = 4, .heads_kv = 4, .head_dim = 64, .dtype = dtype, .packed = true};
      p.total_q = p.total_kv = p.batch * 64;  // nobody says how long the longest is
      for (const Pass pass : {Pass::forward, Pass::backward}) {
        const Plan plan = make_plan(p, pass, cpu_with(isa, 2));
        EXPECT_LE(static_cast<std::int64_t>(plan.workspace_bytes), 4 * tensor_bytes(p)) << plan.kernel;
      }
    }
  }
}

/// Few queries on K and V that are too short for a split for each thread: key heads are shared, too, and no thread waits.
TEST(CpuPlan, FewQueriesKeepAllThreadsBusy) {
  for (const auto& [seq_q, seq_kv, head_dim] :
       {std::array{1, 1000, 64}, {8, 1000, 64}, {13, 1530, 24}, {16, 1500, 128}, {3, 2450, 256}, {1, 32768, 64}}) {
    for (const int threads : {2, 3, 8, 16}) {
      const Problem p{.seq_q = seq_q, .seq_kv = seq_kv, .heads_q = 8, .heads_kv = 8, .head_dim = head_dim};
      const Plan plan = make_plan(p, Pass::forward, cpu_with(CpuIsa::avx512, threads), "cpu/decode");
      const int groups = (8 + plan.cpu.heads_together - 1) / plan.cpu.heads_together, items = groups * plan.num_splits;
      EXPECT_GE(items, threads) << seq_q << " x " << seq_kv << ": " << groups << " x " << plan.num_splits;
      const int rounds = (items + threads - 1) / threads;
      EXPECT_GE(5 * items, 4 * rounds * threads) << items << " items on " << threads << " threads";
    }
  }
}

TEST(CpuPlan, HeadsThatShareKeysAreNotSideBySide) {
  Problem p{.seq_q = 1, .seq_kv = 8192, .heads_q = 8, .heads_kv = 8, .head_dim = 64};
  const DeviceInfo device = cpu_with(CpuIsa::avx512, 2);
  EXPECT_GT(make_plan(p, Pass::forward, device).num_splits, 1);  // one item for all heads: the keys are split
  p.k_strides = p.v_strides = {.seq = 64, .head = 0};
  const Plan shared = make_plan(p, Pass::forward, device);
  EXPECT_EQ(shared.kernel, "cpu/decode");
  EXPECT_EQ(shared.num_splits, 1);  // an item for each head: enough for the threads
  p.k_strides = p.v_strides = {.seq = 64, .head = 8192 * 64};
  EXPECT_EQ(make_plan(p, Pass::forward, device).num_splits, 1);
}

/// The thresholds were tuned with 1 MB and with 2 MB: plans there, and where the cache is not known, are the same.
TEST(CpuPlan, SmallerCachesOfACoreLowerTheThresholds) {
  DeviceInfo device = cpu_with(CpuIsa::avx512, 2);
  Problem prefill{.batch = 4, .seq_q = 600, .seq_kv = 600, .heads_q = 8, .heads_kv = 8, .head_dim = 64};
  const Problem decoding{.seq_q = 1, .seq_kv = 1024, .heads_q = 2, .heads_kv = 2, .head_dim = 64};
  for (const std::int64_t cache : {0, 1 << 20, 2 << 20, 256 << 10}) {
    device.core_cache_bytes = cache;
    const bool small = cache == 256 << 10;
    EXPECT_EQ(make_plan(prefill, Pass::forward, device).cpu.cache_resident_bytes, small ? 384 << 10 : 3 << 19);
    prefill.seq_kv = 600;  // 307 KB of a head
    EXPECT_EQ(make_plan(prefill, Pass::forward, device).cpu.copies_keys, small) << cache;
    EXPECT_EQ(make_plan(prefill, Pass::forward, device).block_q, 2 * 48);
    prefill.seq_kv = 400;  // 205 KB of a head
    EXPECT_EQ(make_plan(prefill, Pass::forward, device).block_q, small ? 2 * 48 : 48);
    EXPECT_EQ(make_plan(decoding, Pass::forward, device, "cpu/decode").cpu.heads_together, small ? 2 : 1);
  }
}

}  // namespace
}  // namespace flash_attention
