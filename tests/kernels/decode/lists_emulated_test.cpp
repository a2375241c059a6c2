// decode/sm80 over lists of keys: each query has its own, with holes, keys twice, in pages; and what it leaves to others.
#include <cmath>

#include "kernels/emulated.h"
#include "support/oracle/pages.h"
#include "support/oracle/tensors.h"

namespace flash_attention::testing {
namespace {

KeyList decode_keys(std::int64_t entries, std::int64_t heads = 1, bool counts = false) {
  return {.kind = KeyListKind::keys, .entries = entries, .heads = heads, .counts = counts};
}

KeyList decode_blocks(std::int64_t entries, std::int64_t size, std::int64_t heads = 1, bool counts = false) {
  return {.kind = KeyListKind::blocks, .entries = entries, .heads = heads, .block_kv = size, .counts = counts};
}

std::vector<Case> decode_list_cases() {
  std::vector<Case> cases;
  const auto add = [&](const char* name, void (*change)(Case&, Problem&)) {
    Case c = base(name, Dtype::bfloat16);
    Problem& p = c.problem;
    p.heads_q = 8, p.heads_kv = 2, p.seq_q = 3, p.seq_kv = 211, p.head_dim = p.head_dim_v = 64,
    p.key_list = decode_keys(150);
    change(c, p);
    cases.push_back(std::move(c));
  };
  add("list", [](Case&, Problem&) {});
  add("list_pages", [](Case& c, Problem& p) { p.key_list = decode_keys(130, 2, true), put_in_pages(c, 16, {211, 90}); });
  add("list_pages_of_one", [](Case& c, Problem& p) { p.causal = true, put_in_pages(c, 1, {70, 0}); });
  add("list_one", [](Case&, Problem& p) { p.key_list = decode_keys(1), p.dtype = Dtype::float16; });
  add("list_none", [](Case&, Problem& p) { p.key_list = decode_keys(0); });
  add("list_of_an_empty_cache", [](Case&, Problem& p) { p.seq_kv = 0, p.key_list = decode_keys(9); });
  add("list_long", [](Case& c, Problem& p) {
    p.batch = 1, p.seq_q = 1, p.key_list = decode_keys(1500), c.draw = Draw::growing, p.seq_kv = 700;
  });
  add("list_odd_group", [](Case& c, Problem& p) {
    p.heads_q = 14, p.heads_kv = 2, p.head_dim = 40, p.head_dim_v = 72, p.key_list = decode_keys(65, 2),
    c.draw = Draw::large;
  });
  add("list_wide_group", [](Case&, Problem& p) { p.heads_q = 70, p.heads_kv = 1, p.key_list = decode_keys(127); });
  add("list_wide_head",
      [](Case&, Problem& p) { p.head_dim = p.head_dim_v = 256, p.key_list = decode_keys(63), p.batch = 1; });
  add("list_causal_window", [](Case& c, Problem& p) {
    p.window_left = 60, p.window_right = 0, p.seqused_q = p.seqused_kv = true, c.seqused_q = {2, 3},
    c.seqused_kv = {180, 211};
  });
  add("list_chunk_sink_softcap",
      [](Case&, Problem& p) { p.attention_chunk = 50, p.causal = p.sink = true, p.softcap = 3; });
  add("list_padding", [](Case& c, Problem& p) { p.left_padding = true, c.left_padding = {0, 100}; });
  add("list_packed", [](Case& c, Problem& p) { pack(c, {5, 0, 1, 9}, {65, 7, 80, 129}), p.key_list = decode_keys(50, 2); });
  add("list_nan_key", [](Case& c, Problem& p) { p.key_list = decode_keys(30), c.nan_key = 70; });
  add("list_nan_value", [](Case& c, Problem& p) { p.key_list = decode_keys(30), c.nan_value = 70, p.causal = true; });
  add("list_many_queries", [](Case&, Problem& p) { p.batch = 1, p.seq_q = 37, p.key_list = decode_keys(40, 1, true); });
  add("list_latent", [](Case&, Problem& p) {
    p.heads_q = 16, p.heads_kv = 1, p.seq_q = 2, p.head_dim = 576, p.head_dim_v = 512, p.latent = true,
    p.key_list = decode_keys(90);
  });
  add("list_latent_value", [](Case& c, Problem& p) {
    p.heads_q = 5, p.heads_kv = 1, p.head_dim = p.head_dim_v = 64, p.latent = true, put_in_pages(c, 8, {211, 90});
  });
  add("blocks_pages", [](Case& c, Problem& p) {
    p.key_list = decode_blocks(9, 16, 2, true), put_in_pages(c, 16, {211, 90});
  });
  add("blocks_pages_causal", [](Case& c, Problem& p) {
    p.key_list = decode_blocks(4, 128), p.causal = true, put_in_pages(c, 128, {211, 150});
  });
  add("blocks_packed", [](Case& c, Problem& p) { pack(c, {5, 0, 9}, {65, 7, 131}), p.key_list = decode_blocks(30, 3, 2); });
  return cases;
}

using DecodeListCases = ::testing::TestWithParam<Case>;

/// Many blocks share an item, then a block takes several; on sm_90, which has other plans, every other case.
TEST_P(DecodeListCases, Emulated) {
  const bool other = std::hash<std::string>{}(GetParam().name) % 2 != 0;
  for (const auto& [arch, sms] : {std::pair(80, 108), {other || with_long_tail() ? 90 : 80, 3}}) {
    emulator::set_num_sms(sms);
    emulator::set_seed(std::hash<std::string>{}(GetParam().name) + static_cast<unsigned>(sms));
    check(GetParam(), {.device = {.kind = DeviceKind::emulator, .emulated_arch = arch}, .kernel = "decode/sm80"});
  }
  emulator::set_num_sms(0);
}

INSTANTIATE_TEST_SUITE_P(Bfloat16, DecodeListCases, ::testing::ValuesIn(decode_list_cases()), case_name);

/// The contract's lists, with and without caches, that the kernel supports; in the long tail all of them.
std::vector<Case> contract_lists() {
  std::vector<Case> cases = list_cases(Dtype::bfloat16);
  for (Case& c : list_cache_cases(Dtype::bfloat16)) cases.push_back(std::move(c));
  const Target decoding{.device = {.kind = DeviceKind::emulator, .emulated_arch = 80}, .kernel = "decode/sm80"};
  std::erase_if(cases, [&](const Case& c) { return !rejection(c, decoding).empty(); });
  return share_of(std::move(cases), 3, 0);
}

using DecodeListsContract = ::testing::TestWithParam<Case>;

TEST_P(DecodeListsContract, Emulated) {
  emulator::set_num_sms(5);
  check_emulated(GetParam(), "decode/sm80", Pass::forward);
  emulator::set_num_sms(0);
}

INSTANTIATE_TEST_SUITE_P(Bfloat16, DecodeListsContract, ::testing::ValuesIn(contract_lists()), case_name);

/// The largest scores of the rows, and lse.
std::pair<std::vector<float>, std::vector<float>> largest_scores(const Case& c, const Inputs& in, const Options& options) {
  const std::unique_ptr<Memory> memory = memory_of(options.device);
  Tensors tensors(c, in, *memory);
  Buffers b = tensors.buffers();
  const Problem& p = c.problem;
  std::vector<float> largest(static_cast<std::size_t>(p.batch * p.heads_q * p.seq_q), -1e9f), lse = largest;
  b.dout = nullptr, b.dq = b.dk = b.dv = nullptr;
  b.row_max = static_cast<float*>(memory->allocate(largest.size() * sizeof(float)));
  b.lse = static_cast<float*>(memory->allocate(largest.size() * sizeof(float)));
  Options with_workspace = options;
  with_workspace.workspace_bytes = workspace_bytes(p, Pass::forward, options);
  with_workspace.workspace = memory->allocate(std::max<std::size_t>(with_workspace.workspace_bytes, 1));
  forward(p, b, with_workspace);
  memory->read(largest.data(), b.row_max, largest.size() * sizeof(float));
  memory->read(lse.data(), b.lse, lse.size() * sizeof(float));
  return {largest, lse};
}

/// Of one key it is lse; of several that of the CPU, of which the Python tests know the formula. With and without parts.
TEST(DecodeLists, TellTheLargestScore) {
  for (Case c : decode_list_cases()) {
    const bool latent = c.name.find("latent") != std::string::npos;
    if (c.problem.key_list.kind != KeyListKind::keys) continue;
    if (c.problem.packed || c.nan_key >= 0 || c.nan_value >= 0 || c.problem.sink) continue;
    const Inputs in = draw_inputs(c);
    const auto [wanted, unused] = largest_scores(c, in, {.device = {.kind = DeviceKind::cpu}});
    for (const char* kernel : {"decode/sm80", "forward/listed"}) {
      if (latent && !with_long_tail()) continue;
      emulator::set_num_sms(c.name.size() % 2 == 0 ? 108 : 3);
      const Options options{.device = {.kind = DeviceKind::emulator, .emulated_arch = 80}, .kernel = kernel};
      const auto [got, lse] = largest_scores(c, in, options);
      for (std::size_t row = 0; row < got.size(); ++row) {
        if (c.problem.key_list.entries == 1) {
          EXPECT_FLOAT_EQ(got[row], lse[row]) << c.name << " " << kernel;
        }
        if (got[row] == wanted[row]) continue;  // -inf, too
        EXPECT_NEAR(got[row], wanted[row], 1e-4 * (1 + std::abs(wanted[row]))) << c.name << " " << kernel << " row " << row;
      }
    }
  }
  emulator::set_num_sms(0);
}

TEST(DecodeListsPlan, TakesWhatHasNoPositionsInScores) {
  Problem p{.seq_q = 4, .seq_kv = 4096, .heads_q = 16, .heads_kv = 4, .head_dim = 128, .dtype = Dtype::bfloat16};
  p.key_list = decode_keys(512);
  for (const int arch : {80, 90}) EXPECT_EQ(make_plan(p, Pass::forward, typical_gpu(arch)).kernel, "decode/sm80");
  for (Problem other : {p, p, p, p}) {
    static int number = 0;
    if (number == 0) other.alibi = true;
    if (number == 1) other.key_list = decode_blocks(8, 8), other.key_list.block_q = 2;
    if (number == 2) other.dtype = Dtype::float32;
    if (number++ == 3) other.dropout_p = 0.5f;
    EXPECT_EQ(make_plan(other, Pass::forward, typical_gpu(80)).kernel, "forward/listed");
  }
}

}  // namespace
}  // namespace flash_attention::testing
