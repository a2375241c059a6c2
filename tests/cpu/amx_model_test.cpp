// The AMX kernel on a machine without AMX: the same source over a model of the tile registers, put through the contract.

#include <gtest/gtest.h>

#include <cmath>
#include <cstring>

#include "api/checks/validate.h"
#include "cpu/program_code.h"
#include "cpu/tails.h"
#include "launch/cpu_call.h"
#include "plan/families/cpu_tiles.h"
#include "support/cases/contract.h"
#include "support/cases/programs.h"
#include "support/oracle/rounding.h"
#include "support/oracle/tensors.h"

namespace flash_attention::cpu {
namespace {
constexpr int vector_lanes = 4;
constexpr int tile_rows = 4;
constexpr int tile_vectors = 2;
constexpr int block_q = plan::cpu_amx_block_q;
constexpr int block_kv = plan::cpu_amx_block_kv;
constexpr int lane_multiple = 16;
constexpr bool only_bfloat16 = true;
}  // namespace
}  // namespace flash_attention::cpu

#include "cpu/simd/generic.h"
//
#include "cpu/isa/bfloat16_table.h"
#include "cpu/tile/amx.h"
#include "cpu/tile/program_scores.h"

namespace flash_attention::cpu {
namespace {

/// What Intel's manual says the instructions do, one loop each. Using a register that is not configured is an error.
struct ModelTiles {
  struct Register {
    std::uint32_t words[16][16];
  };
  static inline Register registers[8];
  static inline bool configured = false;

  static void configure() {
    configured = true;
    std::memset(registers, 0xff, sizeof registers);
  }
  static void release() { configured = false; }

  template <int tile>
  static void zero() {
    EXPECT_TRUE(configured);
    registers[tile] = {};
  }
  template <int tile>
  static void load(const void* from, std::int64_t stride_bytes) {
    EXPECT_TRUE(configured);
    for (int row = 0; row < 16; ++row) {
      std::memcpy(registers[tile].words[row], static_cast<const char*>(from) + row * stride_bytes, 64);
    }
  }
  template <int tile>
  static void store(void* to, std::int64_t stride_bytes) {
    EXPECT_TRUE(configured);
    for (int row = 0; row < 16; ++row)
      std::memcpy(static_cast<char*>(to) + row * stride_bytes, registers[tile].words[row], 64);
  }
  template <int sum, int a, int b>
  static void multiply() {
    static_assert(sum != a && sum != b && a != b, "the instruction faults on equal registers");
    EXPECT_TRUE(configured);
    const auto half = [](std::uint32_t word, int which) {
      const std::uint32_t bits = which == 0 ? word << 16 : word & 0xffff0000u;
      float x;
      std::memcpy(&x, &bits, 4);
      return x;
    };
    for (int m = 0; m < 16; ++m) {
      for (int n = 0; n < 16; ++n) {
        float total;
        std::memcpy(&total, &registers[sum].words[m][n], 4);
        for (int k = 0; k < 16; ++k) {
          for (int which : {0, 1}) total += half(registers[a].words[m][k], which) * half(registers[b].words[k][n], which);
        }
        std::memcpy(&registers[sum].words[m][n], &total, 4);
      }
    }
  }

  static Short round(Vec x) { return float_to_bfloat16(x); }
  static Vec pair(Vec low, Vec high) {
    return (Vec)(__builtin_convertvector(float_to_bfloat16(low), Uint) |
                 (__builtin_convertvector(float_to_bfloat16(high), Uint) << 16));
  }
};

constexpr KernelTable model_table = make_bfloat16_table<TileProducts<ModelTiles>>();

class AmxModel : public ::testing::TestWithParam<testing::Case> {
 protected:
  /// False, and the test is skipped, where the kernel does not take the case.
  bool plan_for(Pass pass) {
    DeviceInfo device;
    device.isa = CpuIsa::amx;
    try {
      plan_ = make_plan(GetParam().problem, pass, device, "cpu/bfloat16");
    } catch (const Error& error) {
      EXPECT_EQ(error.code(), ErrorCode::unsupported) << error.what();
      return false;
    }
    return true;
  }

  void run(const Step* steps, Pass pass, testing::Memory& memory, const Buffers& buffers) {
    const testing::Case& c = GetParam();
    std::vector<char> dirt(plan_.workspace_bytes, static_cast<char>(0xff));
    const Options options{.workspace = dirt.data(), .seed = c.dropout_seed, .offset = c.dropout_offset};
    const Call call = make_call(api::normalise(c.problem, pass), plan_, plan_.block_q, buffers, options);
    void* scratch = memory.allocate(model_table.scratch_bytes);
    clear_tails(call, pass == Pass::backward);
    for (const Step* step = steps; step->count != nullptr; ++step) {
      for (std::int64_t item = 0; item < step->count(call); ++item) step->run(call, item, scratch);
    }
    EXPECT_FALSE(ModelTiles::configured);
  }

 private:
  Plan plan_;
};

TEST_P(AmxModel, Forward) {
  if (!plan_for(Pass::forward)) GTEST_SKIP() << "not for this kernel";
  const testing::Case& c = GetParam();
  const testing::Inputs in = testing::draw_inputs(c);
  const testing::Results want = testing::oracle(c, in, false), plain = testing::oracle(c, in, false, c.problem.dtype);
  const auto memory = testing::memory_of({});
  testing::Tensors tensors(c, in, *memory);
  run(model_table.prefill, Pass::forward, *memory, tensors.buffers());
  const testing::Results got = tensors.read(false);
  EXPECT_EQ(tensors.written_gap(), "");
  testing::compare("out", got.out, want.out, plain.out, c.problem.dtype);
  testing::compare("lse", got.lse, want.lse, want.lse, Dtype::float32);
}

TEST_P(AmxModel, Backward) {
  if (!plan_for(Pass::backward)) GTEST_SKIP() << "not for this kernel";
  const testing::Case& c = GetParam();
  const testing::Inputs in = testing::draw_inputs(c);
  const testing::Results want = testing::oracle(c, in, true), plain = testing::oracle(c, in, true, c.problem.dtype);
  const auto memory = testing::memory_of({});
  testing::Tensors tensors(c, in, *memory);
  testing::Results rounded = want;
  for (double& x : rounded.out) x = testing::round_to(c.problem.dtype, x);
  tensors.set_forward(rounded);
  run(model_table.backward, Pass::backward, *memory, tensors.buffers());
  const testing::Results got = tensors.read(true);
  EXPECT_EQ(tensors.written_gap(), "");
  testing::compare("dq", got.dq, want.dq, plain.dq, c.problem.dtype);
  testing::compare("dk", got.dk, want.dk, plain.dk, c.problem.dtype);
  testing::compare("dv", got.dv, want.dv, plain.dv, c.problem.dtype);
  if (c.dsink) testing::compare("dsink", got.dsink, want.dsink, plain.dsink, Dtype::float16);
}

// Programs run by the interpreter of another instruction set.
TEST(AmxModelPrograms, AgreeWithFp64) {
  DeviceInfo device;
  device.isa = CpuIsa::amx;
  const auto call_model = [&](const Problem& problem, Pass pass, const Buffers& buffers) {
    Problem plain = problem;
    plain.program_gradients = 0;
    const Plan plan = make_plan(plain, pass, device, "cpu/bfloat16");
    std::vector<char> workspace(plan.workspace_bytes, static_cast<char>(0xff));
    Call call = make_call(api::normalise(plain, pass), plan, plan.block_q, buffers, {.workspace = workspace.data()});
    const CompiledProgram compiled(plain, pass, {hide_by_program, change_by_program});
    const ProgramCall program(compiled, buffers, nullptr);
    call.program = program.view();
    const auto memory = testing::memory_of({});
    void* scratch = memory->allocate(model_table.scratch_bytes);
    const Step* step = pass == Pass::forward ? model_table.prefill : model_table.backward;
    for (; step->count != nullptr; ++step) {
      for (std::int64_t item = 0; item < step->count(call); ++item) step->run(call, item, scratch);
    }
  };
  for (unsigned seed = 0; seed < 6; ++seed) {
    const testing::RandomProgram random(3000 + seed, seed % 3 != 1, seed % 3 != 2);
    const Problem problem{.batch = 1,
                          .seq_q = 61 + 30 * seed,
                          .seq_kv = 290,
                          .heads_q = 2,
                          .heads_kv = 1 + seed % 2,
                          .head_dim = 16,
                          .dtype = Dtype::bfloat16,
                          .causal = seed % 2 == 0};
    const testing::ProgramResults got = testing::run_program(problem, random, {}, seed, {.call = call_model});
    const testing::ProgramResults expected = testing::exact_program(problem, random, seed);
    EXPECT_LT(testing::difference(got.out, expected.out), 0.02) << random.text;
    EXPECT_LT(testing::difference(got.lse, expected.lse), 0.001) << random.text;
    EXPECT_LT(testing::difference(got.dq, expected.dq), 0.02) << random.text;
    EXPECT_LT(testing::difference(got.dk, expected.dk), 0.02) << random.text;
    EXPECT_LT(testing::difference(got.dv, expected.dv), 0.02) << random.text;
  }
}

INSTANTIATE_TEST_SUITE_P(Contract, AmxModel, ::testing::ValuesIn(testing::contract_cases(Dtype::bfloat16)),
                         testing::case_name);

}  // namespace
}  // namespace flash_attention::cpu
