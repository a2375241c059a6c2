// Forward and backward: a few steps of gradient descent that teach the values to give a wanted output.
#include <flash_attention/attention.h>

#include <cmath>
#include <cstdio>
#include <memory>
#include <random>
#include <vector>

namespace fa = flash_attention;

int main() {
  const fa::Problem problem{.seq_q = 128, .seq_kv = 128, .heads_q = 4, .heads_kv = 2, .head_dim = 32};
  const std::size_t q_count = 128 * 4 * 32, kv_count = 128 * 2 * 32;
  std::vector<float> q(q_count), k(kv_count), v(kv_count), out(q_count), wanted(q_count), lse(4 * 128);
  std::vector<float> dout(q_count), dq(q_count), dk(kv_count), dv(kv_count);
  std::mt19937 random(1);
  std::normal_distribution<float> normal;
  for (std::vector<float>* tensor : {&q, &k, &v}) {
    for (float& x : *tensor) x = normal(random);
  }
  for (std::size_t n = 0; n < q_count; ++n) wanted[n] = std::sin(static_cast<float>(n % 32));

  const fa::Buffers buffers{.q = q.data(),
                            .k = k.data(),
                            .v = v.data(),
                            .out = out.data(),
                            .lse = lse.data(),
                            .dout = dout.data(),
                            .dq = dq.data(),
                            .dk = dk.data(),
                            .dv = dv.data()};
  // The library never allocates behind your back: it says what it needs.
  const std::size_t bytes = fa::workspace_bytes(problem, fa::Pass::backward);
  struct alignas(256) Block {
    std::byte bytes[256];
  };
  const std::unique_ptr<Block[]> workspace(new Block[bytes / sizeof(Block) + 1]);
  const fa::Options options{.workspace = workspace.get(), .workspace_bytes = bytes};

  float first_loss = 0, loss = 0;
  for (int step = 0; step < 20; ++step) {
    fa::forward(problem, buffers);
    loss = 0;
    for (std::size_t n = 0; n < q_count; ++n) {
      dout[n] = out[n] - wanted[n];
      loss += dout[n] * dout[n] / 2;
    }
    if (step == 0) first_loss = loss;
    fa::backward(problem, buffers, options);
    for (std::size_t n = 0; n < kv_count; ++n) v[n] -= 0.2f * dv[n];
  }
  std::printf("loss: %.1f at the start, %.1f after 20 steps\n", first_loss, loss);
  return loss < first_loss / 2 ? 0 : 1;
}
