// A program that is ALiBi becomes the option: what a call with it takes, and what it refuses.
#include <gtest/gtest.h>

#include <array>
#include <string>
#include <vector>

#include "flash_attention/attention.h"
#include "flash_attention/error.h"

namespace flash_attention {
namespace {

/// score - t0[b, h] |i - j|.
struct AlibiCall {
  Problem problem{.batch = 2, .seq_q = 3, .seq_kv = 3, .heads_q = 2, .heads_kv = 2, .head_dim = 4};
  std::vector<float> q = std::vector<float>(48, 0.5f), out = std::vector<float>(48);
  std::array<float, 4> slopes{1, 2, 3, 4};
  std::array<const void*, 1> tensors{slopes.data()};

  AlibiCall() {
    problem.program =
        "t0 = tensor float32 2\nx = load t0 b h\nd = sub i j\na = abs d\nf = float a\ny = mul x f\nz = sub score y\n"
        "score = z";
    problem.program_sizes[0] = {2, 2};
  }

  /// What is said against it; empty: it ran.
  std::string run(const float* alibi_slopes = nullptr) {
    Buffers buffers{.q = q.data(), .k = q.data(), .v = q.data(), .out = out.data(), .alibi_slopes = alibi_slopes};
    buffers.program_tensors = tensors.data();
    try {
      forward(problem, buffers);
    } catch (const Error& error) {
      return error.what();
    }
    return "";
  }
};

TEST(AlibiProgram, AMissingTensorIsRefusedByItsName) {
  AlibiCall call;
  EXPECT_EQ(call.run(), "");
  call.tensors[0] = nullptr;
  EXPECT_TRUE(call.run().starts_with("program tensor t0: got null")) << call.run();
}

TEST(AlibiProgram, SlopesBesideAProgramAreRefused) {
  AlibiCall call;
  EXPECT_TRUE(call.run(call.slopes.data()).starts_with("alibi_slopes")) << "they would be left out in silence";
}

TEST(AlibiProgram, WithoutABatchSlopesOfEachEntryAreNowhere) {
  AlibiCall call;
  call.problem.batch = 0, call.problem.program_sizes[0] = {0, 2};
  call.tensors[0] = nullptr;
  EXPECT_EQ(call.run(), "");
}

}  // namespace
}  // namespace flash_attention
