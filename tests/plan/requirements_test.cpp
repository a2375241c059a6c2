// What each GPU kernel must refuse, one requirement at a time: a kernel that takes too much computes wrong results.
#include <gtest/gtest.h>

#include <functional>

#include "flash_attention/attention.h"
#include "plan/kernel_config.h"

namespace flash_attention {
namespace {

DeviceInfo gpu(int arch) {
  return {.device = {.kind = DeviceKind::cuda},
          .name = "GPU",
          .arch = arch,
          .num_sms = 132,
          .shared_bytes = arch == 90 ? 232448 : 166912,
          .l2_bytes = 50 << 20,
          .memory_bytes = 1ll << 37};
}

Problem plain() {
  return {.batch = 2, .seq_q = 300, .seq_kv = 300, .heads_q = 4, .heads_kv = 2, .head_dim = 64, .dtype = Dtype::bfloat16};
}

/// Why the kernel does not take the problem; empty where it does.
std::string refusal(const Problem& problem, const std::string& kernel) {
  const Pass pass = kernel.starts_with("forward") ? Pass::forward : Pass::backward;
  try {
    make_plan(problem, pass, gpu(kernel.ends_with("sm90") ? 90 : 80), kernel);
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::unsupported) << error.what();
    return error.what();
  }
  return "";
}

const char* const fast_kernels[] = {"forward/sm80", "backward/sm80", "forward/sm90", "backward/sm90"};

TEST(Requirements, APlainProblemIsTaken) {
  for (const char* kernel : fast_kernels) EXPECT_EQ(refusal(plain(), kernel), "") << kernel;
}

/// Their maxima are taken before scaling.
TEST(Requirements, AScaleThatIsNotPositive) {
  for (const char* kernel : {"forward/sm80", "backward/sm80", "forward/sm90"}) {
    for (const float scale : {0.0f, -0.0f, -1.0f, -1e-30f}) {
      Problem p = plain();
      p.scale = scale;
      EXPECT_NE(refusal(p, kernel), "") << kernel << " " << scale;
      EXPECT_EQ(refusal(p, kernel).find("does not exist"), std::string::npos);
    }
    Problem p = plain();
    p.scale = 1e-30f;
    EXPECT_EQ(refusal(p, kernel), "") << kernel;
  }
}

struct Tensor {
  const char* name;
  Strides Problem::*strides;
  bool of_keys, gradient;
};
const Tensor tensors[] = {
    {"q", &Problem::q_strides, false, false},      {"k", &Problem::k_strides, true, false},
    {"v", &Problem::v_strides, true, false},       {"out", &Problem::out_strides, false, false},
    {"dout", &Problem::dout_strides, false, true}, {"dq", &Problem::dq_strides, false, true},
    {"dk", &Problem::dk_strides, true, true},      {"dv", &Problem::dv_strides, true, true},
};

/// The problem with rows far apart, and one stride of one tensor longer by `more`.
Problem stretched(const Tensor& tensor, int axis, std::int64_t more) {
  Problem p = plain();
  const std::int64_t heads = tensor.of_keys ? p.heads_kv : p.heads_q;
  Strides& s = p.*tensor.strides;
  s = {heads * 128 * 400, heads * 128, 128};
  (axis == 0 ? s.batch : axis == 1 ? s.seq : s.head) += more;
  return p;
}

/// sm80 moves 16 bytes at a time: strides are multiples of 8 elements, of every tensor and along every axis.
TEST(Requirements, StridesOfSm80) {
  for (const Tensor& tensor : tensors) {
    for (int axis = 0; axis < 3; ++axis) {
      for (const char* kernel : {"forward/sm80", "backward/sm80"}) {
        const bool counts = !tensor.gradient || kernel[0] == 'b';
        EXPECT_EQ(refusal(stretched(tensor, axis, 8), kernel), "") << tensor.name << axis;
        for (const std::int64_t more : {1, 2, 4, 6, 7, 12}) {
          EXPECT_EQ(refusal(stretched(tensor, axis, more), kernel).empty(), !counts)
              << kernel << ": " << tensor.name << " axis " << axis << " + " << more;
        }
      }
    }
  }
}

/// TMA takes positive multiples of 16 bytes below 2^40; what it does not carry (dq, dk, dv) is stored in pairs.
TEST(Requirements, StridesOfSm90) {
  for (const Tensor& tensor : tensors) {
    for (int axis = 0; axis < 3; ++axis) {
      const bool by_tma = !tensor.gradient || std::string(tensor.name) == "dout";
      for (const char* kernel : {"forward/sm90", "backward/sm90"}) {
        const bool counts = !tensor.gradient || kernel[0] == 'b';
        EXPECT_EQ(refusal(stretched(tensor, axis, 8), kernel), "") << tensor.name << axis;
        for (const std::int64_t more : {1, 3, 7}) {
          EXPECT_EQ(refusal(stretched(tensor, axis, more), kernel).empty(), !counts)
              << kernel << tensor.name << axis << more;
        }
        for (const std::int64_t more : {2, 4, 6, 12}) {
          EXPECT_EQ(refusal(stretched(tensor, axis, more), kernel).empty(), !counts || !by_tma)
              << kernel << tensor.name << axis << more;
        }
      }
    }
  }
  for (Strides Problem::*strides : {&Problem::q_strides, &Problem::k_strides, &Problem::v_strides}) {
    for (const char* kernel : {"forward/sm90", "backward/sm90"}) {
      Problem p = plain();
      p.*strides = {-(std::int64_t{1} << 20), 512, 64};
      EXPECT_NE(refusal(p, kernel), "") << "a negative stride";
      p.*strides = {0, 512, 64};
      EXPECT_NE(refusal(p, kernel), "") << "one tensor for the whole batch";
      p.*strides = {std::int64_t{1} << 39, 512, 64};  // 2^40 bytes
      EXPECT_NE(refusal(p, kernel), "");
      p.*strides = {(std::int64_t{1} << 39) - 8, 512, 64};
      EXPECT_EQ(refusal(p, kernel), "");
      p.batch = 1;
      p.*strides = {-3, 512, 64};
      EXPECT_EQ(refusal(p, kernel), "") << "one sequence needs no stride";
    }
  }
}

/// forward/sm90 where blocks take tiles by a counter: all blocks together must be able to remember what there is, 256 each.
TEST(Requirements, TurnsAreTakenOnlyWhereBlocksCanRememberThem) {
  const auto plan_of = [](std::int64_t heads, int num_sms) {
    Problem p = plain();
    p.batch = 1, p.heads_q = p.heads_kv = heads, p.seq_q = p.seq_kv = 192 * 6, p.causal = true;
    DeviceInfo device = gpu(90);
    device.num_sms = num_sms;
    return make_plan(p, Pass::forward, device, "forward/sm90");
  };
  int with_turns = 0, without = 0;
  for (const int num_sms : {3, 16, 132}) {
    for (std::int64_t heads = 1; heads < 60 * num_sms; heads += num_sms + 1) {
      const Plan plan = plan_of(heads, num_sms);
      const bool turns = plan::config_of<abi::ForwardConfig>(plan.launches[0])->dynamic_scheduler;
      (turns ? with_turns : without) += 1;
      if (!turns) continue;
      ASSERT_EQ(plan.block_q, 192);
      EXPECT_LE(6 * heads, 256 * plan.launches[0].grid[0]) << heads << " heads on " << num_sms << " SMs";
      EXPECT_GE(plan.zeroed_bytes, sizeof(unsigned)) << "the counter";
    }
  }
  EXPECT_GT(with_turns, 20);
  EXPECT_GT(without, 20);
}

}  // namespace
}  // namespace flash_attention
