#include <bit>
#include <cmath>

#include "api/checks/refuse.h"
#include "flash_attention/attention.h"

namespace flash_attention {
namespace {

struct Words {
  std::uint32_t w[4];
};

/// Philox4x32 with seven rounds (Salmon et al., 2011).
Words philox(Words counter, std::uint32_t key0, std::uint32_t key1) {
  for (int round = 0; round < 7; ++round) {
    const std::uint64_t product0 = std::uint64_t{0xD2511F53u} * counter.w[0];
    const std::uint64_t product1 = std::uint64_t{0xCD9E8D57u} * counter.w[2];
    counter = {{static_cast<std::uint32_t>(product1 >> 32) ^ counter.w[1] ^ key0, static_cast<std::uint32_t>(product1),
                static_cast<std::uint32_t>(product0 >> 32) ^ counter.w[3] ^ key1, static_cast<std::uint32_t>(product0)}};
    key0 += 0x9E3779B9u;
    key1 += 0xBB67AE85u;
  }
  return counter;
}

}  // namespace

bool dropout_keeps(std::uint64_t seed, std::uint64_t offset, float dropout_p, std::int64_t batch_idx, std::int64_t head_idx,
                   std::int64_t heads_q, std::int64_t i, std::int64_t j) {
  api::require(dropout_p >= 0 && dropout_p < 1, "dropout_p", double{dropout_p}, "allowed is [0, 1)");
  const auto low = [](std::uint64_t x) { return static_cast<std::uint32_t>(x); };
  const auto high = [](std::uint64_t x) { return static_cast<std::uint32_t>(x >> 32); };
  // A block of words decides on two rows and four columns: bit 3 of i and bit 3 of j choose the word, bit 0 of j whether
  // its halves are exchanged, and the other bits are the counter.
  const Words words =
      philox({{static_cast<std::uint32_t>(i / 16 * 8 + i % 8), static_cast<std::uint32_t>(j / 16 * 4 + j % 8 / 2),
               static_cast<std::uint32_t>(batch_idx * heads_q + head_idx), low(offset)}},
             low(seed), high(seed) ^ high(offset));
  const std::uint32_t word = words.w[i / 8 % 2 * 2 + j / 8 % 2];
  return std::rotl(word, j % 2 * 16) >= static_cast<std::uint32_t>(std::floor(double{dropout_p} * 0x1p32));
}

}  // namespace flash_attention
