#include "cpu/backend.h"

#include <gtest/gtest.h>
#include <sched.h>
#include <unistd.h>

#include <cmath>
#include <filesystem>
#include <fstream>
#include <thread>

#include "cpu/caches.h"
#include "cpu/detect.h"
#include "cpu/kernel_rows.h"
#include "cpu/peaks.h"
#include "flash_attention/error.h"
#include "plan/kernel_table.h"

namespace flash_attention::cpu {
namespace {

TEST(CpuBackend, SaysWhatTheMachineIs) {
  const DeviceInfo device = info();
  EXPECT_EQ(device.device.kind, DeviceKind::cpu);
  EXPECT_FALSE(device.name.empty());
  EXPECT_TRUE(has_isa(device.isa));
  EXPECT_GE(device.threads, 1);
  EXPECT_GT(device.memory_bytes, 0);
  EXPECT_TRUE(has_isa(best_isa()));
  EXPECT_GE(usable_processors(), 1);
}

TEST(CpuBackend, UsesTheProcessorsThatItMay) {
  int usable = 0;
  std::thread([&] {
    cpu_set_t one;
    CPU_ZERO(&one);
    CPU_SET(static_cast<std::size_t>(sched_getcpu()), &one);
    if (sched_setaffinity(0, sizeof one, &one) == 0) usable = usable_processors();
  }).join();
  EXPECT_EQ(usable, 1);
}

TEST(CpuBackend, KeepsToTheQuotaOfItsControlGroup) {
  const std::filesystem::path group = ::testing::TempDir() + "flash_attention_group_" + std::to_string(getpid());
  std::filesystem::create_directories(group / "cpu");
  EXPECT_EQ(quota_of(group), INFINITY);
  std::ofstream(group / "cpu" / "cpu.cfs_quota_us") << -1;
  std::ofstream(group / "cpu" / "cpu.cfs_period_us") << 100000;
  EXPECT_EQ(quota_of(group), INFINITY);
  std::ofstream(group / "cpu" / "cpu.cfs_quota_us") << 150000;
  EXPECT_EQ(quota_of(group), 1.5);
  std::ofstream(group / "cpu.max") << "250000 100000";
  EXPECT_EQ(quota_of(group), 2.5);
  std::filesystem::remove_all(group);
}

TEST(CpuBackend, KeepsToTheQuotasOfTheGroupsAboveToo) {
  const std::filesystem::path groups = ::testing::TempDir() + "flash_attention_groups_" + std::to_string(getpid());
  std::filesystem::create_directories(groups / "outer" / "inner");
  std::filesystem::create_directories(groups / "cpu" / "old" / "older");
  const std::string membership = groups / "membership";
  std::ofstream(membership) << "12:memory:/elsewhere\n0::/outer/inner\n";
  EXPECT_EQ(quota_of_process(groups, membership), INFINITY);
  std::ofstream(groups / "outer" / "cpu.max") << "300000 100000";
  std::ofstream(groups / "outer" / "inner" / "cpu.max") << "max 100000";
  EXPECT_EQ(quota_of_process(groups, membership), 3);
  std::ofstream(groups / "outer" / "inner" / "cpu.max") << "50000 100000";
  EXPECT_EQ(quota_of_process(groups, membership), 0.5);
  std::ofstream(membership) << "3:cpu,cpuacct:/old/older\n";
  std::ofstream(groups / "cpu" / "old" / "cpu.cfs_quota_us") << 200000;
  std::ofstream(groups / "cpu" / "old" / "cpu.cfs_period_us") << 100000;
  EXPECT_EQ(quota_of_process(groups, membership), 2);
  EXPECT_EQ(quota_of_process(groups, groups / "not_there"), INFINITY);
  std::filesystem::remove_all(groups);
}

TEST(CpuBackend, CachesAreThoseOfOneProcessor) {
  const std::filesystem::path folder = ::testing::TempDir() + "flash_attention_caches_" + std::to_string(getpid());
  const auto add = [&](int index, int level, const char* type, const char* size) {
    const std::filesystem::path cache = folder / ("index" + std::to_string(index));
    std::filesystem::create_directories(cache);
    std::ofstream(cache / "level") << level;
    std::ofstream(cache / "type") << type;
    std::ofstream(cache / "size") << size;
  };
  EXPECT_EQ(read_caches(folder).last, 0);
  add(0, 1, "Data", "32K");
  add(1, 2, "Instruction", "64K");
  EXPECT_EQ(read_caches(folder).core, 0);
  EXPECT_EQ(read_caches(folder).last, 32 << 10);
  add(2, 2, "Unified", "1024K");
  EXPECT_EQ(read_caches(folder).core, 1 << 20);
  EXPECT_EQ(read_caches(folder).last, 1 << 20);
  add(3, 3, "Unified", "32M");
  EXPECT_EQ(read_caches(folder).core, 1 << 20);
  EXPECT_EQ(read_caches(folder).last, 32 << 20);
  add(2, 2, "Unified", "unknown");
  EXPECT_EQ(read_caches(folder).core, 0);
  std::filesystem::remove_all(folder);
}

TEST(CpuBackend, EveryKernelOfThePlannerHasSteps) {
  for (const plan::KernelEntry& entry : plan::kernel_table()) {
    if (entry.device != DeviceKind::cpu) continue;
    Plan plan;
    plan.kernel = entry.name;
    plan.pass = entry.pass;
    EXPECT_NE(row_of(plan).steps(kernel_table(CpuIsa::generic)), nullptr) << entry.name;
  }
}

TEST(CpuBackend, RefusesAnInstructionSetThatIsNotHere) {
  for (const CpuIsa isa : {CpuIsa::generic, CpuIsa::neon, CpuIsa::avx2, CpuIsa::avx512, CpuIsa::avx512_bf16, CpuIsa::amx}) {
    if (has_isa(isa)) {
      EXPECT_NO_THROW(kernel_table(isa)) << to_string(isa);
      continue;
    }
    try {
      kernel_table(isa);
      ADD_FAILURE() << to_string(isa);
    } catch (const Error& error) {
      EXPECT_EQ(error.code(), ErrorCode::unavailable);
      EXPECT_NE(std::string(error.what()).find(to_string(isa)), std::string::npos) << error.what();
    }
  }
}

TEST(CpuBackend, PairProductsAreChosenOnlyWhereTheyAre) {
  DeviceInfo device = info();
  Problem problem{.seq_q = 128, .seq_kv = 128, .head_dim = 64, .dtype = Dtype::bfloat16};
  device.isa = CpuIsa::avx512;
  EXPECT_EQ(make_plan(problem, Pass::forward, device).kernel, "cpu/prefill");
  for (const CpuIsa isa : {CpuIsa::amx, CpuIsa::avx512_bf16}) {
    device.isa = isa;
    EXPECT_EQ(make_plan(problem, Pass::forward, device).kernel, "cpu/bfloat16");
  }
  problem.dtype = Dtype::float16;
  EXPECT_EQ(make_plan(problem, Pass::forward, device).kernel, "cpu/prefill");
  problem.seq_q = 1;
  EXPECT_EQ(make_plan(problem, Pass::forward, device).kernel, "cpu/decode");
}

TEST(CpuBackend, DecodeTakesRowsThatDoNotFillLanes) {
  DeviceInfo device = info();
  const auto kernel_for = [&](std::int64_t rows, std::int64_t keys, Dtype dtype) {
    const Problem problem{.seq_q = rows, .seq_kv = keys, .heads_q = 8, .heads_kv = 8, .head_dim = 64, .dtype = dtype};
    return make_plan(problem, Pass::forward, device).kernel;
  };
  device.isa = CpuIsa::avx512;
  for (const std::int64_t rows : {1, 4, 8, 11, 17, 24})
    EXPECT_EQ(kernel_for(rows, 300, Dtype::float32), "cpu/decode") << rows;
  for (const std::int64_t rows : {12, 16, 25, 48}) EXPECT_EQ(kernel_for(rows, 300, Dtype::float32), "cpu/prefill") << rows;
  EXPECT_EQ(kernel_for(16, 4000, Dtype::float32), "cpu/decode");  // reads the heads together, from memory
  EXPECT_EQ(kernel_for(25, 4000, Dtype::float32), "cpu/prefill");
  EXPECT_EQ(kernel_for(8, 64, Dtype::float32), "cpu/prefill");
  device.isa = CpuIsa::avx512_bf16;
  EXPECT_EQ(kernel_for(16, 300, Dtype::bfloat16), "cpu/decode");
  EXPECT_EQ(kernel_for(24, 300, Dtype::bfloat16), "cpu/decode");
  EXPECT_EQ(kernel_for(25, 300, Dtype::bfloat16), "cpu/bfloat16");
  device.isa = CpuIsa::avx2;
  EXPECT_EQ(kernel_for(11, 300, Dtype::float32), "cpu/decode");
  EXPECT_EQ(kernel_for(20, 300, Dtype::float32), "cpu/prefill");
  device.isa = CpuIsa::generic;
  EXPECT_EQ(kernel_for(8, 300, Dtype::float32), "cpu/decode");
  EXPECT_EQ(kernel_for(9, 300, Dtype::float32), "cpu/prefill");
}

TEST(CpuBackend, PeaksAreNumbers) {
  const Peaks peaks = measure_peaks(1);
  EXPECT_TRUE(std::isfinite(peaks.flops) && peaks.flops > 0) << peaks.flops;
  EXPECT_TRUE(std::isfinite(peaks.read_bytes) && peaks.read_bytes > 0) << peaks.read_bytes;
}

}  // namespace
}  // namespace flash_attention::cpu
