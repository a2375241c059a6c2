// One forward pass: causal attention of 2 sequences of 1000 tokens with 8 heads.
#include <flash_attention/attention.h>

#include <cstdio>
#include <random>
#include <vector>

int main() {
  const flash_attention::Problem problem{
      .batch = 2, .seq_q = 1000, .seq_kv = 1000, .heads_q = 8, .heads_kv = 8, .head_dim = 64, .causal = true};
  const std::size_t count = 2 * 1000 * 8 * 64;

  std::vector<float> q(count), k(count), v(count), out(count), lse(2 * 8 * 1000);
  std::mt19937 random(1);
  std::normal_distribution<float> normal;
  for (std::vector<float>* tensor : {&q, &k, &v}) {
    for (float& x : *tensor) x = normal(random);
  }

  flash_attention::forward(problem, {.q = q.data(), .k = k.data(), .v = v.data(), .out = out.data(), .lse = lse.data()});

  // The first query sees the first key alone, so its output is the first value.
  std::printf("out[0] = %f, v[0] = %f, lse of the last query = %f\n", out[0], v[0], lse.back());
  std::puts(flash_attention::explain(problem, flash_attention::Pass::forward).c_str());
  return out[0] == v[0] ? 0 : 1;
}
