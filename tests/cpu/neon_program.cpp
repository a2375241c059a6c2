// Compiled for AArch64 by neon_test.cpp and run under an emulator: the kernels for NEON against the generic ones, which the
// contract covers on every machine. Prints what differs; returns the number of differences.

#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <random>
#include <string>
#include <vector>

#include "cpu/call.h"
#include "cpu/isa/tables.h"

using namespace flash_attention::cpu;

namespace {

int failures = 0;

void expect(bool good, const std::string& what) {
  if (good) return;
  ++failures;
  std::printf("%s\n", what.c_str());
}

constexpr std::int64_t seq_q = 37, seq_kv = 83, heads_q = 4, heads_kv = 2, dim_v = 40;
constexpr int dim = 72;

struct Tensor {
  std::vector<char> bytes;
  TensorView view;
};

std::uint16_t to_half(Dtype element, float x) {
  if (element == Dtype::float16) {
    const __fp16 half = static_cast<__fp16>(x);
    std::uint16_t bits;
    std::memcpy(&bits, &half, 2);
    return bits;
  }
  std::uint32_t bits;
  std::memcpy(&bits, &x, 4);
  return static_cast<std::uint16_t>(bits >> 16);
}

float to_float(Dtype element, const char* from) {
  if (element == Dtype::float32) {
    float x;
    std::memcpy(&x, from, 4);
    return x;
  }
  std::uint16_t bits;
  std::memcpy(&bits, from, 2);
  if (element == Dtype::float16) {
    __fp16 half;
    std::memcpy(&half, &bits, 2);
    return static_cast<float>(half);
  }
  const std::uint32_t wide = static_cast<std::uint32_t>(bits) << 16;
  float x;
  std::memcpy(&x, &wide, 4);
  return x;
}

Tensor random_tensor(Dtype element, std::int64_t seq, std::int64_t heads, std::int64_t width, unsigned seed) {
  const std::size_t size = element == Dtype::float32 ? 4 : 2;
  Tensor tensor;
  tensor.bytes.resize(static_cast<std::size_t>(seq * heads * width) * size);
  std::mt19937 random(seed);
  std::normal_distribution<float> normal;
  for (std::size_t i = 0; i < tensor.bytes.size() / size; ++i) {
    const float x = normal(random);
    const std::uint16_t half = to_half(element, x);
    std::memcpy(tensor.bytes.data() + i * size, size == 4 ? static_cast<const void*>(&x) : &half, size);
  }
  tensor.view = {tensor.bytes.data(), seq * heads * width, heads * width, width};
  return tensor;
}

void run(const KernelTable& table, const Step* steps, const Call& call) {
  std::vector<char> memory(table.scratch_bytes + 64);
  void* scratch = memory.data() + (64 - reinterpret_cast<std::uintptr_t>(memory.data()) % 64);
  for (; steps->count != nullptr; ++steps) {
    for (std::int64_t item = 0; item < steps->count(call); ++item) steps->run(call, item, scratch);
  }
}

void compare(const std::string& name, Dtype element, const Tensor& got, const Tensor& want) {
  const std::size_t size = element == Dtype::float32 ? 4 : 2;
  const double allowed = element == Dtype::float32 ? 2e-5 : element == Dtype::float16 ? 2e-3 : 2e-2;
  double worst = 0;
  for (std::size_t i = 0; i < got.bytes.size(); i += size) {
    const double x = to_float(element, got.bytes.data() + i), y = to_float(element, want.bytes.data() + i);
    worst = std::isnan(x) ? INFINITY : std::max(worst, std::fabs(x - y) / std::max(1.0, std::fabs(y)));
  }
  expect(worst <= allowed, name + ": error " + std::to_string(worst));
}

/// One call with many options at once, forward and backward.
void check_attention(Dtype element, bool options, std::int64_t queries) {
  const std::string name = "element " + std::to_string(static_cast<int>(element)) + (options ? ", options" : "") + ", " +
                           std::to_string(queries) + " queries";
  Tensor q = random_tensor(element, queries, heads_q, dim, 1), k = random_tensor(element, seq_kv, heads_kv, dim, 2);
  Tensor v = random_tensor(element, seq_kv, heads_kv, dim_v, 3), dout = random_tensor(element, queries, heads_q, dim_v, 4);
  Tensor bias = random_tensor(Dtype::float32, queries, 1, seq_kv, 5);
  std::vector<std::uint8_t> mask(static_cast<std::size_t>(seq_kv), 1);
  for (std::size_t j = 0; j < mask.size(); j += 5) mask[j] = 0;
  const std::vector<float> slopes{0.1f, 0.2f, 0.3f, 0.4f}, sink{0.5f, -1, 2, 0};
  std::vector<char> workspace(1 << 22);

  struct Output {
    Tensor out, dq, dk, dv;
    std::vector<float> lse;
  };
  const auto attend = [&](const KernelTable& table) {
    Output o{random_tensor(element, queries, heads_q, dim_v, 6), random_tensor(element, queries, heads_q, dim, 7),
             random_tensor(element, seq_kv, heads_kv, dim, 8), random_tensor(element, seq_kv, heads_kv, dim_v, 9),
             std::vector<float>(static_cast<std::size_t>(heads_q * queries))};
    Call call;
    call.dtype = call.kv_dtype = element;
    call.q = q.view, call.k = k.view, call.v = v.view, call.out = o.out.view, call.dout = dout.view;
    call.dq = o.dq.view, call.dk = o.dk.view, call.dv = o.dv.view;
    call.lse = o.lse.data();
    call.batch = 1, call.seq_q = queries, call.seq_kv = seq_kv;
    call.heads_q = heads_q, call.heads_kv = heads_kv, call.group = heads_q / heads_kv;
    call.head_dim = dim, call.head_dim_v = dim_v;
    call.scale = 0.125f;
    call.window_right = 0;
    call.workspace = workspace.data();
    if (options) {
      call.softcap = 20;
      call.bias = {bias.bytes.data(), Dtype::float32, 0, 0, seq_kv};
      call.mask = {.data = reinterpret_cast<char*>(mask.data())};
      call.alibi_slopes = slopes.data();
      call.sink = sink.data();
      call.dropout = true;
      call.drop_threshold = 0x40000000u;
      call.keep_scale = 4 / 3.0f;
      call.seed = 123456789012345ull;
    }
    run(table, queries <= 4 ? table.decode : table.prefill, call);
    run(table, table.backward, call);
    return o;
  };
  const Output got = attend(neon_table), want = attend(generic_table);
  compare(name + ", out", element, got.out, want.out);
  compare(name + ", dq", element, got.dq, want.dq);
  compare(name + ", dk", element, got.dk, want.dk);
  compare(name + ", dv", element, got.dv, want.dv);
  for (std::size_t i = 0; i < got.lse.size(); ++i) {
    expect(got.lse[i] == want.lse[i] || std::fabs(got.lse[i] - want.lse[i]) < 2e-5, name + ", lse");
  }
}

void check_exp2() {
  for (const float special : {-INFINITY, -127.0f, -126.0f, 0.0f, 127.0f, 128.0f, INFINITY, NAN}) {
    alignas(64) float from[16], to[16];
    for (float& x : from) x = special;
    neon_table.exp2(from, to, 16);
    const float want = special < -126 ? 0 : std::exp2(special);
    expect(std::isnan(want) ? std::isnan(to[3]) : to[3] == want,
           "exp2(" + std::to_string(special) + ") = " + std::to_string(to[3]));
  }
}

}  // namespace

int main() {
  check_exp2();
  for (const Dtype element : {Dtype::float32, Dtype::float16, Dtype::bfloat16}) {
    for (const bool options : {false, true}) {
      for (const std::int64_t queries : {std::int64_t{2}, std::int64_t{4}, seq_q})
        check_attention(element, options, queries);
    }
  }
  std::printf("%d differences\n", failures);
  return failures == 0 ? 0 : 1;
}
