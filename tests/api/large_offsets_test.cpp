// Offsets have 64 bits: rows, heads and sequences that lie more than 2^32 elements apart, in memory that is mostly holes.
#include <gtest/gtest.h>
#include <sys/mman.h>

#include <algorithm>
#include <cmath>
#include <functional>
#include <random>

#include "flash_attention/attention.h"

namespace flash_attention {
namespace {

constexpr std::int64_t batch = 2, seq = 3, heads = 2, dim = 8;
constexpr std::int64_t far = (std::int64_t{1} << 32) + 24;  // elements: 32 bits would make it 24

/// Address space without memory, but for the pages that are written.
class Holes {
 public:
  explicit Holes(std::size_t bytes) : bytes_(bytes) {
    void* memory = ::mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    data_ = memory == MAP_FAILED ? nullptr : static_cast<float*>(memory);
  }
  ~Holes() {
    if (data_ != nullptr) ::munmap(data_, bytes_);
  }
  Holes(const Holes&) = delete;
  Holes& operator=(const Holes&) = delete;
  float* data() const { return data_; }

 private:
  std::size_t bytes_;
  float* data_ = nullptr;
};

struct Layout {
  const char* name;
  Strides strides;
};
const Layout layouts[] = {
    {"dense", {seq * heads * dim, heads* dim, dim}},
    {"sequences far apart", {far, heads* dim, dim}},
    {"rows far apart", {dim * heads, far, dim}},
    {"heads far apart", {dim * seq, dim, far}},
};
constexpr std::size_t reach = (static_cast<std::size_t>(far) * (seq - 1) + 4096) * sizeof(float);

using Each = std::function<void(std::int64_t at, std::int64_t index)>;
void for_each(const Strides& s, const Each& each) {
  std::int64_t index = 0;
  for (std::int64_t b = 0; b < batch; ++b)
    for (std::int64_t i = 0; i < seq; ++i)
      for (std::int64_t h = 0; h < heads; ++h)
        for (std::int64_t d = 0; d < dim; ++d) each(b * s.batch + i * s.seq + h * s.head + d, index++);
}

struct Tensors {
  explicit Tensors(const Strides& s) : strides(s) {
    for (auto& memory : tensors) memory = std::make_unique<Holes>(reach);
    std::mt19937 random(3);
    std::normal_distribution<float> normal;
    for (int t : {0, 1, 2, 4}) {
      for_each(strides, [&](std::int64_t at, std::int64_t) { (*this)[t][at] = normal(random); });
    }
  }
  float* operator[](int t) const { return tensors[static_cast<std::size_t>(t)]->data(); }
  std::vector<float> values(int t) const {
    std::vector<float> all;
    for_each(strides, [&](std::int64_t at, std::int64_t) { all.push_back((*this)[t][at]); });
    return all;
  }

  Strides strides;
  std::array<std::unique_ptr<Holes>, 8> tensors;  // q, k, v, out, dout, dq, dk, dv
};

/// out, dq, dk, dv, one after another.
std::vector<float> results(const Strides& strides) {
  const Tensors t(strides);
  for (int i = 0; i < 8; ++i) {
    if (t[i] == nullptr) return {};
  }
  Problem p{.batch = batch, .seq_q = seq, .seq_kv = seq, .heads_q = heads, .heads_kv = heads, .head_dim = dim};
  for (Strides* s : {&p.q_strides, &p.k_strides, &p.v_strides, &p.out_strides, &p.dout_strides, &p.dq_strides,
                     &p.dk_strides, &p.dv_strides}) {
    *s = strides;
  }
  std::vector<float> lse(batch * heads * seq);
  std::vector<char> space(1 << 20);
  void* aligned = space.data();
  std::size_t left = space.size();
  std::align(256, left - 512, aligned, left);
  const Options options{.workspace = aligned, .workspace_bytes = left - 512};
  forward(p, {.q = t[0], .k = t[1], .v = t[2], .out = t[3], .lse = lse.data()}, options);
  backward(
      p,
      {.q = t[0], .k = t[1], .v = t[2], .out = t[3], .lse = lse.data(), .dout = t[4], .dq = t[5], .dk = t[6], .dv = t[7]},
      options);
  std::vector<float> all;
  for (int i : {3, 5, 6, 7}) {
    const auto part = t.values(i);
    all.insert(all.end(), part.begin(), part.end());
  }
  return all;
}

TEST(LargeOffsets, GiveTheSameResultsAsDenseTensors) {
  const std::vector<float> dense = results(layouts[0].strides);
  if (dense.empty()) GTEST_SKIP() << "no address space";
  for (const Layout& layout : layouts) {
    const std::vector<float> far_apart = results(layout.strides);
    if (far_apart.empty()) GTEST_SKIP() << "no address space";
    ASSERT_EQ(far_apart.size(), dense.size());
    for (std::size_t i = 0; i < dense.size(); ++i) {
      ASSERT_NEAR(far_apart[i], dense[i], 1e-5) << layout.name << " " << i;
    }
  }
}

/// A mask and a bias whose rows lie far apart, and slopes of sequences.
TEST(LargeOffsets, OfScoreTensorsAndSlopes) {
  const Holes memory(reach);
  if (memory.data() == nullptr) GTEST_SKIP() << "no address space";
  const Tensors t(layouts[0].strides);
  std::vector<float> near(seq * seq), out[2];
  std::mt19937 random(5);
  std::normal_distribution<float> normal;
  for (float& x : near) x = normal(random);
  for (std::int64_t i = 0; i < seq; ++i) std::copy_n(&near[i * seq], seq, memory.data() + i * far);
  for (const bool far_away : {false, true}) {
    Problem p{.batch = batch, .seq_q = seq, .seq_kv = seq, .heads_q = heads, .heads_kv = heads, .head_dim = dim};
    p.bias = {.present = true, .q_stride = far_away ? far : seq};
    forward(p, {.q = t[0], .k = t[1], .v = t[2], .out = t[3], .bias = far_away ? memory.data() : near.data()});
    out[far_away] = t.values(3);
  }
  EXPECT_EQ(out[0], out[1]);
  std::vector<float> slopes{0.1f, 0.2f, 0.3f, 0.4f};
  std::copy_n(slopes.data(), heads, memory.data());
  std::copy_n(slopes.data() + heads, heads, memory.data() + far);
  for (const bool far_away : {false, true}) {
    Problem p{.batch = batch, .seq_q = seq, .seq_kv = seq, .heads_q = heads, .heads_kv = heads, .head_dim = dim};
    p.alibi = true, p.alibi_batch_stride = far_away ? far : heads;
    forward(p, {.q = t[0], .k = t[1], .v = t[2], .out = t[3], .alibi_slopes = far_away ? memory.data() : slopes.data()});
    out[far_away] = t.values(3);
  }
  EXPECT_EQ(out[0], out[1]);
}

}  // namespace
}  // namespace flash_attention
