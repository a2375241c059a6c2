#include "jit/report.h"

#include <gtest/gtest.h>

namespace flash_attention::jit {
namespace {

TEST(Report, numbers_of_the_assembler) {
  const CompileReport report = read_report(
      "ptxas info    : 11 bytes gmem\n"
      "ptxas info    : Compiling entry function 'kernel' for 'sm_90a'\n"
      "ptxas info    : Function properties for kernel\n"
      "    32 bytes stack frame, 8 bytes spill stores, 12 bytes spill loads\n"
      "ptxas info    : Used 168 registers, used 2 barriers, 32 bytes cumulative stack size, 1040 bytes smem\n"
      "ptxas info    : Compile time = 12.3 ms\n");
  EXPECT_EQ(report.registers, 168);
  EXPECT_EQ(report.stack_bytes, 32);
  EXPECT_EQ(report.spill_store_bytes, 8);
  EXPECT_EQ(report.spill_load_bytes, 12);
  EXPECT_EQ(report.shared_bytes, 1040);
  EXPECT_TRUE(report.wgmma_warnings.empty());
}

TEST(Report, slow_wgmma_is_found) {
  const CompileReport report = read_report(
      "ptxas info    : (C7519) Potential Performance Loss: warpgroup.arrive is injected in around line 5 by compiler\n"
      "ptxas info    : (C7510) Potential Performance Loss: wgmma.mma_async instructions are serialized due to x\n"
      "unit.cu(3): warning: variable \"serializer\" was declared but never referenced\n");
  ASSERT_EQ(report.wgmma_warnings.size(), 2u);
  EXPECT_NE(report.wgmma_warnings[0].find("C7519"), std::string::npos);
  EXPECT_NE(report.wgmma_warnings[1].find("C7510"), std::string::npos);
}

TEST(Report, nothing_said) {
  const CompileReport report = read_report("");
  EXPECT_EQ(report.registers, 0);
  EXPECT_EQ(report.spill_store_bytes, 0);
}

}  // namespace
}  // namespace flash_attention::jit
