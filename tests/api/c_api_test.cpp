#include "flash_attention/c_api.h"

#include <gtest/gtest.h>

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <string>
#include <vector>

#include "flash_attention/attention.h"
#include "flash_attention/version.h"

namespace {

struct Call {
  flash_attention_problem problem;
  flash_attention_buffers buffers;
  flash_attention_options options;
  std::vector<float> q, k, v, out, lse;

  Call() : q(2 * 5 * 3 * 8, 0.5f), k(q), v(q), out(q.size(), -1), lse(2 * 3 * 5, -1) {
    flash_attention_problem_init(&problem);
    flash_attention_buffers_init(&buffers);
    flash_attention_options_init(&options);
    problem.batch = 2, problem.seq_q = 5, problem.seq_kv = 5, problem.heads_q = 3, problem.heads_kv = 3,
    problem.head_dim = 8;
    for (std::size_t x = 0; x < v.size(); ++x) v[x] = static_cast<float>(x % 17);
    buffers.q = q.data(), buffers.k = k.data(), buffers.v = v.data(), buffers.out = out.data(), buffers.lse = lse.data();
  }
  flash_attention_status forward() { return flash_attention_forward(&problem, &buffers, &options); }
};

TEST(CApi, EqualKeysGiveTheMeanOfTheValues) {
  Call c;
  ASSERT_EQ(c.forward(), FLASH_ATTENTION_OK) << flash_attention_last_error();
  double mean = 0;
  for (int j = 0; j < 5; ++j) mean += c.v[j * 3 * 8] / 5;
  EXPECT_NEAR(c.out[0], mean, 1e-5);
  EXPECT_NEAR(c.lse[0], 8 * 0.25 / std::sqrt(8.0) + std::log(5.0), 1e-5);
}

/// P V. is attention of the tangent, which here is V; and the sum of dv v is that of dout out.
TEST(CApi, TangentsAndSecondDerivatives) {
  Call c;
  ASSERT_EQ(c.forward(), FLASH_ATTENTION_OK);
  const std::vector<float> want = c.out;
  std::vector<float> tangent(want.size(), -1), dq(want), dk(want), dv(want), dout(want.size(), 0.25f);
  c.buffers.v_tangent = c.v.data(), c.buffers.out_tangent = tangent.data();
  ASSERT_EQ(flash_attention_tangent(&c.problem, &c.buffers, &c.options), FLASH_ATTENTION_OK)
      << flash_attention_last_error();
  for (std::size_t x = 0; x < want.size(); ++x) {
    ASSERT_NEAR(tangent[x], want[x], 1e-5);
    ASSERT_NEAR(c.out[x], want[x], 1e-5);
  }
  tangent.assign(want.size(), -1);
  c.buffers.dout = dout.data(), c.buffers.dq = dq.data(), c.buffers.dk = dk.data(), c.buffers.dv = dv.data();
  EXPECT_EQ(flash_attention_second(&c.problem, &c.buffers, &c.options), FLASH_ATTENTION_INVALID_ARGUMENT);
  size_t bytes = 0;
  ASSERT_EQ(flash_attention_workspace_bytes(&c.problem, FLASH_ATTENTION_SECOND, &c.options, &bytes), FLASH_ATTENTION_OK);
  std::vector<char> workspace(bytes + 256);
  const auto address = reinterpret_cast<std::uintptr_t>(workspace.data());
  c.options.workspace = reinterpret_cast<void*>((address + 255) / 256 * 256), c.options.workspace_bytes = bytes;
  ASSERT_EQ(flash_attention_second(&c.problem, &c.buffers, &c.options), FLASH_ATTENTION_OK) << flash_attention_last_error();
  for (std::size_t x = 0; x < want.size(); ++x) ASSERT_NEAR(tangent[x], want[x], 1e-5);
  for (const float x : dv) ASSERT_EQ(x, 0);
  c.buffers.sink_tangent = c.v.data();
  EXPECT_EQ(flash_attention_tangent(&c.problem, &c.buffers, &c.options), FLASH_ATTENTION_INVALID_ARGUMENT);
  EXPECT_NE(std::strstr(flash_attention_last_error(), "sink_tangent"), nullptr) << flash_attention_last_error();
  c.buffers.sink_tangent = nullptr;
  c.options.workspace = nullptr, c.options.workspace_bytes = 0;
  EXPECT_EQ(c.forward(), FLASH_ATTENTION_INVALID_ARGUMENT);
  EXPECT_NE(std::strstr(flash_attention_last_error(), "v_tangent"), nullptr) << flash_attention_last_error();
}

TEST(CApi, DefaultsAreThoseOfTheCppApi) {
  flash_attention_problem p;
  std::memset(&p, 0xee, sizeof p);
  flash_attention_problem_init(&p);
  EXPECT_EQ(p.size, sizeof p);
  EXPECT_EQ(p.batch, 1);
  EXPECT_EQ(p.window_left, -1);
  EXPECT_EQ(p.window_right, -1);
  EXPECT_EQ(p.q_strides.seq, INT64_MIN);
  EXPECT_TRUE(std::isnan(p.scale));
  EXPECT_EQ(p.precision, FLASH_ATTENTION_PRECISION_AUTO);
}

TEST(CApi, RefusalsBecomeAStatusAndAMessage) {
  Call c;
  c.problem.head_dim = 600;
  EXPECT_EQ(c.forward(), FLASH_ATTENTION_INVALID_ARGUMENT);
  EXPECT_NE(std::strstr(flash_attention_last_error(), "head_dim: got 600"), nullptr) << flash_attention_last_error();
  for (float x : c.out) ASSERT_EQ(x, -1);
}

TEST(CApi, EveryRefusalOfTheContractIsNamedAndNothingIsWritten) {
  static const std::int32_t decreasing[] = {0, 4, 3}, negative[] = {-1, 3, 5};
  struct Mistake {
    const char* message;  // begins with
    void (*make)(Call&);
  };
  const Mistake mistakes[] = {
      {"head_dim: got 577", [](Call& c) { c.problem.head_dim = 577; }},
      {"heads_q: got 3; allowed are multiples of heads_kv, 2", [](Call& c) { c.problem.heads_kv = 2; }},
      {"dropout_p: got 1", [](Call& c) { c.problem.dropout_p = 1; }},
      {"dropout_p: got -", [](Call& c) { c.problem.dropout_p = -0.5f; }},
      {"seq_q: got -1", [](Call& c) { c.problem.seq_q = -1; }},
      {"q: got ", [](Call& c) { c.buffers.q = nullptr; }},
      {"k: got ", [](Call& c) { c.buffers.k = reinterpret_cast<const char*>(c.k.data()) + 1; }},  // misaligned
      {"out: got ", [](Call& c) { c.buffers.out = c.q.data() + 8; }},                             // over an input
      {"stream: got ", [](Call& c) { c.options.stream = &c; }},                                   // on the CPU
      {"cu_seqlens_q[2]: got 3",
       [](Call& c) {
         c.problem.packed = 1, c.problem.total_q = c.problem.total_kv = 5;
         c.buffers.cu_seqlens_q = c.buffers.cu_seqlens_kv = decreasing;
       }},
      {"cu_seqlens_q[0]: got -1",
       [](Call& c) {
         c.problem.packed = 1, c.problem.total_q = c.problem.total_kv = 5;
         c.buffers.cu_seqlens_q = c.buffers.cu_seqlens_kv = negative;
       }},
  };
  for (const Mistake& mistake : mistakes) {
    Call c;
    mistake.make(c);
    EXPECT_EQ(c.forward(), FLASH_ATTENTION_INVALID_ARGUMENT) << mistake.message;
    EXPECT_EQ(std::string(flash_attention_last_error()).rfind(mistake.message, 0), 0u) << flash_attention_last_error();
    for (float x : c.out) ASSERT_EQ(x, -1) << mistake.message;
    for (float x : c.lse) ASSERT_EQ(x, -1) << mistake.message;
  }
}

TEST(CApi, BadStructsAreRefused) {
  Call c;
  EXPECT_EQ(flash_attention_forward(nullptr, &c.buffers, &c.options), FLASH_ATTENTION_INVALID_ARGUMENT);
  c.problem.size = sizeof c.problem + 8;
  EXPECT_EQ(c.forward(), FLASH_ATTENTION_INVALID_ARGUMENT);
  EXPECT_NE(std::strstr(flash_attention_last_error(), "problem->size"), nullptr);
  c.problem.size = sizeof c.problem;
  c.problem.dtype = 3;
  EXPECT_EQ(c.forward(), FLASH_ATTENTION_INVALID_ARGUMENT);
  c.problem.dtype = 0;
  c.options.device_kind = 9;
  EXPECT_EQ(c.forward(), FLASH_ATTENTION_INVALID_ARGUMENT);
}

/// By the emulator's plan: to ask compiles nothing.
TEST(CApi, TilesAndPartsOfAPassAreFieldsOfTheOptions) {
  Call c;
  c.options.device_kind = FLASH_ATTENTION_EMULATOR;
  c.problem.dtype = FLASH_ATTENTION_BFLOAT16;
  const auto explained = [&](int32_t pass) {
    char text[4000] = "";
    const bool ok = flash_attention_explain(&c.problem, pass, &c.options, text, sizeof text, nullptr) == FLASH_ATTENTION_OK;
    return std::string(ok ? text : flash_attention_last_error());
  };
  const auto has = [](const std::string& text, const char* part) { return text.find(part) != std::string::npos; };
  c.options.kernel = "forward/sm90", c.options.tile_q = 128, c.options.tile_kv = 32;
  EXPECT_TRUE(has(explained(FLASH_ATTENTION_FORWARD), "128 queries x 32 keys")) << explained(FLASH_ATTENTION_FORWARD);
  c.options.tile_q = 0;
  EXPECT_TRUE(has(explained(FLASH_ATTENTION_FORWARD), "tile: got (0, 32), allowed: queries and keys"));
  c.options.tile_kv = 0;
  c.options.kernel = "backward/sm80", c.options.part = FLASH_ATTENTION_PART_DQ;
  c.options.part_rows = static_cast<int32_t>(c.problem.seq_q);
  EXPECT_TRUE(has(explained(FLASH_ATTENTION_BACKWARD), "backward/sm80: does no parts of a pass"));
  c.options.part_first = -1;
  EXPECT_TRUE(has(explained(FLASH_ATTENTION_BACKWARD), "part: got negative"));
  c.options.part = FLASH_ATTENTION_PART_DQ + 1;
  EXPECT_TRUE(has(explained(FLASH_ATTENTION_BACKWARD), "part: got 4; allowed are 0 to 3"));
}

TEST(CApi, AnOlderCallerKeepsWorking) {
  Call c;
  c.problem.size = offsetof(flash_attention_problem, sink);  // a header without the last fields
  c.problem.sink = c.problem.deterministic = 0x7f7f7f7f;     // memory the library must not look at
  EXPECT_EQ(c.forward(), FLASH_ATTENTION_OK) << flash_attention_last_error();
}

TEST(CApi, ExplainFitsTheBuffer) {
  Call c;
  char text[12];
  std::size_t needed = 0;
  ASSERT_EQ(flash_attention_explain(&c.problem, FLASH_ATTENTION_FORWARD, &c.options, text, sizeof text, &needed),
            FLASH_ATTENTION_OK);
  EXPECT_EQ(std::strlen(text), sizeof text - 1);
  std::vector<char> whole(needed);
  ASSERT_EQ(flash_attention_explain(&c.problem, FLASH_ATTENTION_FORWARD, &c.options, whole.data(), needed, nullptr),
            FLASH_ATTENTION_OK);
  EXPECT_EQ(std::strlen(whole.data()), needed - 1);
  EXPECT_NE(std::strstr(whole.data(), "cpu/"), nullptr);
}

TEST(CApi, WorkspaceIsAskedFor) {
  Call c;
  std::size_t bytes = 0;
  ASSERT_EQ(flash_attention_workspace_bytes(&c.problem, FLASH_ATTENTION_STANDARD_FORWARD, &c.options, &bytes),
            FLASH_ATTENTION_OK);
  EXPECT_GT(bytes, 0u);
  EXPECT_EQ(flash_attention_workspace_bytes(&c.problem, 6, &c.options, &bytes), FLASH_ATTENTION_INVALID_ARGUMENT);
  EXPECT_STREQ(flash_attention_version(), FLASH_ATTENTION_VERSION);
}

/// By the emulator's plan: to ask compiles nothing.
TEST(CApi, PreparationOfMasksIsAskedFor) {
  Call c;
  const std::int32_t rows[64] = {};
  c.problem.hidden_bounds = 1;
  c.buffers.hidden_rows = rows;
  std::vector<char> workspace(1 << 20);
  c.options.workspace = reinterpret_cast<void*>((reinterpret_cast<std::uintptr_t>(workspace.data()) + 255) / 256 * 256);
  c.options.workspace_bytes = workspace.size() - 256;
  std::size_t bytes = 1;
  std::uint64_t stamp = 1;
  const auto ask = [&](int32_t pass) {
    return flash_attention_mask_preparation(&c.problem, pass, &c.buffers, &c.options, &bytes, &stamp);
  };
  ASSERT_EQ(ask(FLASH_ATTENTION_FORWARD), FLASH_ATTENTION_OK) << flash_attention_last_error();
  EXPECT_EQ(bytes, 0u) << "nothing to prepare on a CPU";
  EXPECT_EQ(stamp, 0u);
  ASSERT_EQ(flash_attention_prepare_mask(&c.problem, 0, &c.buffers, nullptr, 0, &c.options, &stamp), FLASH_ATTENTION_OK);
  EXPECT_EQ(stamp, 0u);
  EXPECT_EQ(c.forward(), FLASH_ATTENTION_OK) << flash_attention_last_error();
  c.options.device_kind = FLASH_ATTENTION_EMULATOR;
  ASSERT_EQ(ask(FLASH_ATTENTION_FORWARD), FLASH_ATTENTION_OK) << flash_attention_last_error();
  EXPECT_GT(bytes, 0u);
  EXPECT_NE(stamp, 0u);
  c.options.prepared_mask = &c;
  c.options.prepared_mask_stamp = stamp + 1;
  EXPECT_EQ(c.forward(), FLASH_ATTENTION_INVALID_ARGUMENT);
  EXPECT_EQ(std::string(flash_attention_last_error()).rfind("prepared_mask", 0), 0u) << flash_attention_last_error();
  EXPECT_EQ(flash_attention_mask_preparation(&c.problem, 0, &c.buffers, &c.options, nullptr, &stamp),
            FLASH_ATTENTION_INVALID_ARGUMENT);
  EXPECT_EQ(flash_attention_prepare_mask(&c.problem, 0, &c.buffers, nullptr, 0, &c.options, nullptr),
            FLASH_ATTENTION_INVALID_ARGUMENT);
}

/// A program that was built when the struct was shorter: what lies behind its struct is not touched.
TEST(CApi, init_writes_no_more_than_the_caller_has) {
  const std::size_t older = offsetof(flash_attention_problem, left_padding);
  flash_attention_problem p;
  std::memset(&p, 0xee, sizeof p);
  flash_attention_problem_init_sized(&p, older);
  EXPECT_EQ(p.size, older);
  EXPECT_EQ(p.batch, 1);
  EXPECT_EQ(p.window_left, -1);
  const auto* bytes = reinterpret_cast<const unsigned char*>(&p);
  for (std::size_t n = older; n < sizeof p; ++n) ASSERT_EQ(bytes[n], 0xee) << n;
  struct Newer {
    flash_attention_problem known;
    std::int64_t unknown;
  } newer;
  std::memset(&newer, 0xee, sizeof newer);
  flash_attention_problem_init_sized(&newer.known, sizeof newer);
  EXPECT_EQ(newer.unknown, 0);
  flash_attention_buffers buffers;
  flash_attention_options options;
  flash_attention_buffers_init(&buffers);
  flash_attention_options_init(&options);
  EXPECT_EQ(flash_attention_forward(&newer.known, &buffers, &options), FLASH_ATTENTION_INVALID_ARGUMENT);
  EXPECT_NE(std::strstr(flash_attention_last_error(), "problem->size"), nullptr);
}

}  // namespace
