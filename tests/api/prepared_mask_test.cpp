// Which prepared masks a call takes, and what it says of others. The emulator's plans are a GPU's; nothing is compiled
// here.
#include "api/masks/prepared_mask.h"

#include <gtest/gtest.h>

#include <functional>

#include "plan/masks.h"

namespace flash_attention {
namespace {

/// A call whose buffers are somewhere: it is refused before they are read.
struct MaskedCall {
  Problem problem{.batch = 1, .seq_q = 300, .seq_kv = 300, .heads_q = 8, .heads_kv = 2, .head_dim = 128};
  Buffers buffers{};
  Options options{};
  std::vector<const void*> tensors = std::vector<const void*>(8, memory(40));
  std::vector<double> scalars{3, 4};

  MaskedCall() {
    problem.dtype = Dtype::float16, problem.causal = true;
    problem.hidden_rows.bounds = 1;
    buffers = {.q = memory(1), .k = memory(2), .v = memory(3), .out = memory(4)};
    buffers.hidden_rows = static_cast<const std::int32_t*>(memory(5));
    options.device = {DeviceKind::emulator, 0, 90};
    options.workspace = memory(6), options.workspace_bytes = 1 << 24;
    options.prepared_mask.data = memory(7);
  }
  void set_program(const char* text) {
    problem.program = text, problem.hidden_rows.bounds = 0, buffers.hidden_rows = nullptr;
    problem.program_sizes[0] = problem.program_sizes[1] = {300};
    buffers.program_tensors = tensors.data(), buffers.program_scalars = scalars.data();
  }
  MaskPreparation asked(Pass pass = Pass::forward) const { return mask_preparation(problem, pass, buffers, options); }

  static void* memory(int n) {
    return reinterpret_cast<void*>(std::uintptr_t{1} << 32 | static_cast<std::uintptr_t>(n) << 26);
  }
};

std::string error_of(const std::function<void()>& call) {
  try {
    call();
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::invalid_argument) << error.what();
    return error.what();
  }
  return "";
}

TEST(PreparedMasks, OfTheOtherDiagonalAreRefused) {
  MaskedCall call;
  call.problem.seq_kv = 350;
  call.options.prepared_mask.stamp = call.asked().stamp;
  call.problem.alignment = Alignment::top_left;
  EXPECT_NE(call.asked().stamp, call.options.prepared_mask.stamp);
  const std::string message = error_of([&] { forward(call.problem, call.buffers, call.options); });
  EXPECT_TRUE(message.starts_with("prepared_mask")) << message;
}

struct Change {
  const char* name;
  void (*make)(MaskedCall&);
};

using OtherCall = ::testing::TestWithParam<Change>;

TEST_P(OtherCall, IsRefusedByName) {
  MaskedCall call;
  call.options.prepared_mask.stamp = call.asked().stamp;
  GetParam().make(call);
  const std::string message = error_of([&] { forward(call.problem, call.buffers, call.options); });
  EXPECT_TRUE(message.starts_with("prepared_mask")) << message;
}

INSTANTIATE_TEST_SUITE_P(
    Masks, OtherCall,
    ::testing::Values(
        Change{"other_rows", [](MaskedCall& c) { c.buffers.hidden_rows += 1; }},
        Change{"more_queries", [](MaskedCall& c) { c.problem.seq_q += 64; }},
        Change{"fewer_keys", [](MaskedCall& c) { c.problem.seq_kv -= 1; }},
        Change{"other_heads", [](MaskedCall& c) { c.problem.heads_q = 4; }},
        Change{"not_causal", [](MaskedCall& c) { c.problem.causal = false; }},
        Change{"top_left", [](MaskedCall& c) { c.problem.alignment = Alignment::top_left, c.problem.seq_q = 299; }},
        Change{"two_bounds", [](MaskedCall& c) { c.problem.hidden_rows.bounds = 2; }},
        Change{"of_heads", [](MaskedCall& c) { c.problem.hidden_rows.head_stride = 300; }},
        Change{"other_tile", [](MaskedCall& c) { c.options.tile = TileSize{128, 64}; }},
        Change{"other_kernel", [](MaskedCall& c) { c.options.kernel = "forward/portable"; }},
        Change{"no_map", [](MaskedCall& c) { c.problem.hidden_rows = {}, c.buffers.hidden_rows = nullptr; }},
        Change{"no_stamp", [](MaskedCall& c) { c.options.prepared_mask.stamp = 0; }},
        Change{"misaligned",
               [](MaskedCall& c) { c.options.prepared_mask.data = static_cast<char*>(MaskedCall::memory(7)) + 1; }}),
    [](const auto& change) { return change.param.name; });

TEST(PreparedMask, OfTheOtherPassIsRefused) {
  MaskedCall call;
  EXPECT_NE(call.asked().stamp, call.asked(Pass::backward).stamp);
  EXPECT_GT(call.asked(Pass::backward).bytes, 0u);
}

/// What is in it depends on the masks alone: layers of other widths, types and options may share it.
TEST(PreparedMask, ServesCallsThatDifferInWhatHidesNothing) {
  MaskedCall call;
  const std::uint64_t stamp = call.asked().stamp;
  call.buffers.q = MaskedCall::memory(20), call.problem.scale = 0.3f, call.problem.dtype = Dtype::bfloat16;
  call.problem.seqused_kv = false, call.problem.sink = true;
  EXPECT_EQ(call.asked().stamp, stamp);
}

TEST(PreparedMask, DependsOnWhatAMaskProgramReads) {
  MaskedCall call;
  call.set_program(
      "t0 = tensor float32 1\nt1 = tensor int32 1\ns0 = scalar float\ns1 = scalar int\nv0 = load t0 i\n"
      "v1 = mul v0 s0\nv2 = add score v1\nv3 = load t1 j\nv4 = lt v3 s1\nscore = v2\nvisible = v4\n");
  const MaskPreparation asked = call.asked();
  EXPECT_GT(asked.bytes, 0u);
  EXPECT_EQ(asked.tensors, 2u) << "t1: the score's tensor hides nothing";
  call.tensors[0] = MaskedCall::memory(50), call.scalars[0] = 5;
  EXPECT_EQ(call.asked().stamp, asked.stamp);
  call.scalars[1] = 5;
  EXPECT_NE(call.asked().stamp, asked.stamp);
  call.scalars[1] = 4, call.tensors[1] = MaskedCall::memory(50);
  EXPECT_NE(call.asked().stamp, asked.stamp);
  call.buffers.program_tensors = nullptr;
  EXPECT_TRUE(error_of([&] { call.asked(); }).starts_with("program_tensors"));
}

TEST(PreparedMask, TooLittleMemoryAndMissingMasksAreRefused) {
  MaskedCall call;
  const std::size_t bytes = call.asked().bytes;
  const auto prepare = [&](void* memory, std::size_t size) {
    return error_of([&] { prepare_mask(call.problem, Pass::forward, call.buffers, memory, size, call.options); });
  };
  EXPECT_TRUE(prepare(MaskedCall::memory(7), bytes - 1).starts_with("bytes: got " + std::to_string(bytes - 1)));
  EXPECT_TRUE(prepare(static_cast<char*>(MaskedCall::memory(7)) + 8, bytes).starts_with("memory"));
  EXPECT_TRUE(prepare(nullptr, bytes).starts_with("memory"));
  call.buffers.hidden_rows = nullptr;
  EXPECT_TRUE(prepare(MaskedCall::memory(7), bytes).starts_with("hidden_rows"));
}

TEST(PreparedMask, MakesTheWorkspaceSmaller) {
  MaskedCall call;
  const MaskPreparation asked = call.asked();
  const std::size_t with = workspace_bytes(call.problem, Pass::forward, call.options);
  call.options.prepared_mask = {};
  const std::size_t without = workspace_bytes(call.problem, Pass::forward, call.options);
  EXPECT_EQ(with + asked.bytes, without + plan::prepared_head_bytes);
  EXPECT_GT(with, 0u) << "the counter of row tiles stays";
}

TEST(PreparedMask, IsNothingOnACpu) {
  MaskedCall call;
  call.options = {};
  EXPECT_EQ(call.asked().bytes, 0u);
  EXPECT_EQ(call.asked().stamp, 0u);
  EXPECT_EQ(prepare_mask(call.problem, Pass::forward, call.buffers, nullptr, 0, call.options).data, nullptr);
}

}  // namespace
}  // namespace flash_attention
