// Gradients with invariant bits in the emulator: a sequence alone, packed, in a padded batch, and on other GPUs.
#include <gtest/gtest.h>

#include <map>
#include <string>
#include <vector>

#include "emulator/host/seed.h"
#include "flash_attention/attention.h"
#include "support/long_tail.h"
#include "support/oracle/memory.h"
#include "support/oracle/rounding.h"

namespace flash_attention::testing {
namespace {

using Bits = std::vector<std::uint16_t>;

/// An element of tensor `kind` of a sequence: a pure function of its place.
std::uint16_t gradient_element(int kind, int sequence, std::int64_t position, std::int64_t column) {
  std::uint64_t x = static_cast<std::uint64_t>(kind * 977 + sequence) * 0x9E3779B97F4A7C15ull;
  for (const std::int64_t part : {position, column})
    x = (x ^ static_cast<std::uint64_t>(part) ^ x >> 31) * 0xBF58476D1CE4E5B9ull;
  return to_bfloat16(2.5f * (static_cast<float>(x >> 40) / 16777216.0f - 0.5f));
}

constexpr std::int64_t bias_columns = 304;  // the longest sequence, in whole rows

struct GradientCall {
  std::vector<int> lengths;  // of the sequences, in their order; a sequence is known by its length
  bool packed = false;
  int num_sms = 4;
  const char* kernel = "backward/sm90";
};

/// dq, dk and dv of the sequence that is `length` long.
std::map<std::string, Bits> gradients_of(const Problem& options, const GradientCall& call, int length) {
  Problem p = options;
  const auto memory = memory_of({.kind = DeviceKind::emulator});
  std::vector<std::int32_t> starts{0}, used;
  p.batch = static_cast<std::int64_t>(call.lengths.size());
  for (const int each : call.lengths) {
    starts.push_back(starts.back() + each), used.push_back(each);
    p.seq_q = p.seq_kv = std::max<std::int64_t>(p.seq_q, each);
  }
  p.packed = call.packed, p.seqused_q = p.seqused_kv = !call.packed && p.batch > 1;
  if (p.packed) p.total_q = p.total_kv = starts.back();
  const std::int64_t rows = p.packed ? p.total_q : p.batch * p.seq_q;
  const auto row_of = [&](std::size_t b, std::int64_t i) {
    return p.packed ? starts[b] + i : static_cast<std::int64_t>(b) * p.seq_q + i;
  };
  const auto filled = [&](int kind, std::int64_t columns) {
    Bits bits(static_cast<std::size_t>(rows * columns), to_bfloat16(0.75f));  // behind a sequence
    for (std::size_t b = 0; b < call.lengths.size(); ++b) {
      for (std::int64_t i = 0; i < call.lengths[b] * columns; ++i)
        bits[static_cast<std::size_t>(row_of(b, i / columns) * columns + i % columns)] =
            gradient_element(kind, call.lengths[b], i / columns, i % columns);
    }
    return bits;
  };
  const auto place = [&](const auto& values) {
    void* to = memory->allocate(values.size() * sizeof(values[0]));
    memory->write(to, values.data(), values.size() * sizeof(values[0]));
    return to;
  };
  const std::int64_t q_columns = p.heads_q * p.head_dim, kv_columns = p.heads_kv * p.head_dim;
  Buffers buffers{.q = place(filled(0, q_columns)), .k = place(filled(1, kv_columns)), .v = place(filled(2, kv_columns))};
  buffers.dout = place(filled(3, q_columns));
  const std::size_t q_bytes = static_cast<std::size_t>(rows * q_columns) * 2,
                    kv_bytes = static_cast<std::size_t>(rows * kv_columns) * 2;
  buffers.out = memory->allocate(q_bytes), buffers.dq = memory->allocate(q_bytes);
  buffers.dk = memory->allocate(kv_bytes), buffers.dv = memory->allocate(kv_bytes);
  buffers.lse = static_cast<float*>(memory->allocate(static_cast<std::size_t>(rows * p.heads_q) * 4));
  if (p.packed) buffers.cu_seqlens_q = buffers.cu_seqlens_kv = static_cast<const std::int32_t*>(place(starts));
  if (p.seqused_q) buffers.seqused_q = buffers.seqused_kv = static_cast<const std::int32_t*>(place(used));
  const auto floats = [&](std::int64_t count) {
    return static_cast<float*>(memory->allocate(static_cast<std::size_t>(count) * 4));
  };
  if (p.sink) {
    const std::vector<float> sink(static_cast<std::size_t>(p.heads_q), 0.3f);
    buffers.sink = static_cast<const float*>(place(sink)), buffers.dsink = floats(p.heads_q);
  }
  const std::int64_t num_biases = p.seq_q * bias_columns;
  if (p.bias.present) {  // one for all sequences and heads
    p.bias.q_stride = bias_columns;
    Bits bias(static_cast<std::size_t>(num_biases));
    for (std::size_t i = 0; i < bias.size(); ++i) bias[i] = gradient_element(5, 0, static_cast<std::int64_t>(i), 0);
    buffers.bias = place(bias), buffers.dbias = memory->allocate(bias.size() * 2);
  }
  emulator::set_num_sms(call.num_sms);
  for (const Pass pass : {Pass::forward, Pass::backward}) {
    Options run{
        .device = {.kind = DeviceKind::emulator, .emulated_arch = call.kernel == std::string("backward/sm90") ? 90 : 80}};
    if (pass == Pass::backward) run.kernel = call.kernel;
    run.workspace_bytes = workspace_bytes(p, pass, run);
    if (run.workspace_bytes > 0) run.workspace = memory->allocate(run.workspace_bytes);
    pass == Pass::forward ? forward(p, buffers, run) : backward(p, buffers, run);
  }
  emulator::set_num_sms(0);
  std::map<std::string, Bits> found;
  for (const auto& [name, from, columns] :
       {std::tuple{"dq", buffers.dq, q_columns}, {"dk", buffers.dk, kv_columns}, {"dv", buffers.dv, kv_columns}}) {
    Bits all(static_cast<std::size_t>(rows * columns));
    memory->read(all.data(), from, all.size() * 2);
    for (std::size_t b = 0; b < call.lengths.size(); ++b) {
      if (call.lengths[b] != length) continue;
      const auto first = all.begin() + static_cast<std::ptrdiff_t>(row_of(b, 0) * columns);
      found[name] = Bits(first, first + length * columns);
    }
  }
  if (p.sink)
    memory->read((found["dsink"] = Bits(static_cast<std::size_t>(2 * p.heads_q))).data(), buffers.dsink,
                 static_cast<std::size_t>(4 * p.heads_q));
  if (p.bias.present) {
    Bits& bits = found["dbias"] = Bits(static_cast<std::size_t>(num_biases));
    memory->read(bits.data(), buffers.dbias, bits.size() * 2);
    for (std::size_t i = 0; i < bits.size(); ++i)
      bits[i] = static_cast<std::int64_t>(i) % bias_columns < p.seq_kv ? bits[i] : 0;
  }
  for (auto& [name, bits] : found) {
    if (name == "dsink") continue;
    for (std::uint16_t& x : bits) x = x == 0x8000 ? 0 : x;  // -0 may stand for 0
  }
  return found;
}

void expect_same_gradients(const Problem& options, const char* kernel = "backward/sm90") {
  constexpr int length = 211;
  const auto want = gradients_of(options, {.lengths = {length}, .kernel = kernel}, length);
  for (const GradientCall& call : {GradientCall{.lengths = {70, length, 9}, .packed = true, .num_sms = 3, .kernel = kernel},
                                   GradientCall{.lengths = {length, 260}, .packed = true, .num_sms = 16, .kernel = kernel},
                                   GradientCall{.lengths = {300, length}, .num_sms = 2, .kernel = kernel}}) {
    for (const auto& [name, bits] : gradients_of(options, call, length))
      EXPECT_EQ(bits, want.at(name)) << name << " beside a sequence of " << call.lengths[0] << ": " << to_string(options);
  }
}

/// Sums over the sequences, in their order: dsink and dbias of one list of sequences, packed and padded.
void expect_same_sums(const Problem& options, const char* kernel) {
  const auto want = gradients_of(options, {.lengths = {70, 131, 9}, .packed = true, .num_sms = 3, .kernel = kernel}, 131);
  for (const auto& [name, bits] : gradients_of(options, {.lengths = {70, 131, 9}, .num_sms = 40, .kernel = kernel}, 131))
    EXPECT_EQ(bits, want.at(name)) << name << " packed and padded by " << kernel;
  EXPECT_EQ(want.size(), 5u);
}

Problem gradient_problem() {
  Problem p{.heads_q = 2, .heads_kv = 1, .head_dim = 64, .dtype = Dtype::bfloat16};
  p.head_dim_v = 64, p.scale = 0.3f, p.invariant = true;
  return p;
}

TEST(InvariantGradients, Causal) {
  Problem p = gradient_problem();
  p.causal = true;
  expect_same_gradients(p);
}

/// The kernels that stand in for backward/sm90.
TEST(InvariantGradients, OtherKernels) {
  Problem p = gradient_problem();
  p.causal = true;
  expect_same_gradients(p, "backward/sm80");
  p.head_dim = p.head_dim_v = 24;
  expect_same_gradients(p, "backward/portable");
}

TEST(InvariantGradients, SumsOverSequences) {
  Problem p = gradient_problem();
  p.causal = p.sink = true, p.bias = {.present = true, .dtype = Dtype::bfloat16};
  for (const char* kernel : {"backward/sm90", "backward/sm80"}) expect_same_sums(p, kernel);
  p.head_dim = p.head_dim_v = 24;
  expect_same_sums(p, "backward/portable");
}

TEST(InvariantGradients, FullAndWide) {
  if (!with_long_tail()) GTEST_SKIP() << "long tail";
  Problem p = gradient_problem();
  p.head_dim = p.head_dim_v = 128;
  expect_same_gradients(p);
}

TEST(InvariantGradients, SoftCap) {
  if (!with_long_tail()) GTEST_SKIP() << "long tail";
  Problem p = gradient_problem();
  p.window_left = 90, p.causal = true, p.softcap = 30;
  expect_same_gradients(p);
}

}  // namespace
}  // namespace flash_attention::testing
