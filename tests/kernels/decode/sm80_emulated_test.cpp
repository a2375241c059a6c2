// decode/sm80 in the emulator: the contract with few queries and with pages, on GPUs of several sizes.
#include <cstring>

#include "emulator/host/seed.h"
#include "kernels/decode/cases.h"
#include "kernels/emulated.h"
#include "support/oracle/tensors.h"

namespace flash_attention::testing {
namespace {

using DecodeSm80 = ::testing::TestWithParam<Case>;

/// Many blocks share an item, then a block takes several items: of half of the cases on another architecture, which has a
/// plan of its own, in the long tail of all. Fixed splits are the same on both, so each case takes one of them.
void check_on_two_gpus(const Case& c) {
  const bool other = std::hash<std::string>{}(c.name) % 2 != 0;
  for (const auto& [arch, sms] : {std::pair(80, 108), {other || with_long_tail() ? 90 : 80, 3}}) {
    if (c.problem.invariant && !with_long_tail() && other != (sms == 3)) continue;
    emulator::set_num_sms(sms);
    emulator::set_seed(std::hash<std::string>{}(c.name) + static_cast<unsigned>(sms));
    check(c, {.device = {.kind = DeviceKind::emulator, .emulated_arch = arch}, .kernel = "decode/sm80"});
  }
  emulator::set_num_sms(0);
}

TEST_P(DecodeSm80, Emulated) { check_on_two_gpus(GetParam()); }

using DecodeSm80Contract = ::testing::TestWithParam<Case>;

TEST_P(DecodeSm80Contract, Emulated) {
  emulator::set_num_sms(5);
  check_emulated(GetParam(), "decode/sm80", Pass::forward);
  emulator::set_num_sms(0);
}

/// A workspace that was used before, by this kernel or by another with other lengths, counts from 0 again.
TEST(DecodeSm80Workspace, IsUsedAgainAsItIs) {
  Case c = base("again", Dtype::bfloat16);
  c.problem.seq_q = 1, c.problem.seq_kv = 700, c.problem.batch = 3, c.problem.seqused_kv = true,
  c.seqused_kv = {700, 3, 400};
  const Options device{.device = {.kind = DeviceKind::emulator, .emulated_arch = 80}, .kernel = "decode/sm80"};
  const std::unique_ptr<Memory> memory = memory_of(device.device);
  Options options = device;
  options.workspace_bytes = workspace_bytes(c.problem, Pass::forward, device);
  ASSERT_GT(options.workspace_bytes, 0u);
  options.workspace = memory->allocate(options.workspace_bytes);
  std::memset(options.workspace, 0, options.workspace_bytes);
  const std::int64_t blocks =
      make_plan(c.problem, Pass::forward, device_info(device.device), "decode/sm80").launches.at(0).grid[0];
  for (const std::vector<std::int32_t>& lengths :
       {std::vector<std::int32_t>{700, 3, 400}, {700, 3, 400}, {1, 699, 0}, {64, 128, 700}, {700, 700, 700}}) {
    c.seqused_kv = lengths;
    const Inputs in = draw_inputs(c);
    Tensors tensors(c, in, *memory);
    Buffers b = tensors.buffers();
    b.dout = nullptr, b.dq = b.dk = b.dv = nullptr;
    forward(c.problem, b, options);
    const Results got = tensors.read(false), want = oracle(c, in, false), plain = oracle(c, in, false, c.problem.dtype);
    compare("out", got.out, want.out, plain.out, c.problem.dtype);
    compare("lse", got.lse, want.lse, want.lse, Dtype::float32);
    // A block that counts on from the call before merges too early; whoever comes last would write over that here.
    for (std::int64_t block = 0; block < blocks; ++block)
      EXPECT_EQ(static_cast<const std::uint64_t*>(options.workspace)[block] & 0xffff, 0u) << "block " << block;
  }
}

/// Merged in the order of the parts, whoever comes last.
TEST(DecodeSm80Workspace, GivesTheSameBitsUnderEverySchedule) {
  Case c = base("order", Dtype::bfloat16);
  c.problem.seq_q = 2, c.problem.seq_kv = 900, c.problem.heads_q = 8, c.problem.scale = 0.2f;
  const Target decode{.device = {.kind = DeviceKind::emulator, .emulated_arch = 80}, .kernel = "decode/sm80"};
  check_reproducible(c, decode, [](int run) { emulator::set_seed(static_cast<std::uint64_t>(40 + run)); });
}

/// Every third shape, with fixed splits: the same results by another order.
std::vector<Case> with_fixed_splits() {
  std::vector<Case> cases;
  const std::vector<Case> shapes = decode_shapes();
  for (std::size_t i = 0; i < shapes.size(); ++i) {
    if (i % 3 != 2 && i + 4 < shapes.size()) continue;  // the last four are long, masked or wide
    cases.push_back(shapes[i]);
    cases.back().name += "_invariant", cases.back().problem.invariant = true;
  }
  return cases;
}

INSTANTIATE_TEST_SUITE_P(FixedSplits, DecodeSm80, ::testing::ValuesIn(with_fixed_splits()), case_name);
INSTANTIATE_TEST_SUITE_P(Shapes, DecodeSm80, ::testing::ValuesIn(decode_shapes()), case_name);
INSTANTIATE_TEST_SUITE_P(Latent, DecodeSm80Contract, ::testing::ValuesIn(latent_16_bits()), case_name);
INSTANTIATE_TEST_SUITE_P(Wide, DecodeSm80Contract, ::testing::ValuesIn(share_of(wide_rows(), 3, 0)), case_name);
INSTANTIATE_TEST_SUITE_P(Cache, DecodeSm80, ::testing::ValuesIn(cache_cases(Dtype::bfloat16)), case_name);
INSTANTIATE_TEST_SUITE_P(Bfloat16, DecodeSm80Contract,
                         ::testing::ValuesIn(telling_share_of(few_queries(Dtype::bfloat16), 6, 3)), case_name);

}  // namespace
}  // namespace flash_attention::testing
