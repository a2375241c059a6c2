#pragma once

// The bits of dropout: Philox4x32-7 with the counter that docs/numerics.md gives. One call of Philox
// serves eight scores, four of which are in a lane's row. So the words are made for 16 keys at a time, in all lanes.

#include "cpu/tile/scores.h"

namespace flash_attention::cpu {
namespace {

inline void philox(std::uint32_t (&counter)[4][vector_lanes], std::uint32_t key0, std::uint32_t key1) {
  FLASH_ATTENTION_UNROLL
  for (int round = 0; round < 7; ++round, key0 += 0x9E3779B9u, key1 += 0xBB67AE85u) {
    for (int lane = 0; lane < vector_lanes; ++lane) {
      const std::uint64_t x = std::uint64_t{0xD2511F53u} * counter[0][lane];
      const std::uint64_t y = std::uint64_t{0xCD9E8D57u} * counter[2][lane];
      counter[0][lane] = static_cast<std::uint32_t>(y >> 32) ^ counter[1][lane] ^ key0;
      counter[1][lane] = static_cast<std::uint32_t>(y);
      counter[2][lane] = static_cast<std::uint32_t>(x >> 32) ^ counter[3][lane] ^ key1;
      counter[3][lane] = static_cast<std::uint32_t>(x);
    }
  }
}

/// keep[key][lane] = 1 / (1 - p) if the score is kept, otherwise 0. The tile begins at a multiple of 16.
inline void dropout_factors(const Call& call, const RowBlock& block, const Tile& tile, float* keep) {
  const auto low = [](std::uint64_t x) { return static_cast<std::uint32_t>(x); };
  const auto high = [](std::uint64_t x) { return static_cast<std::uint32_t>(x >> 32); };
  for (int v = 0; v < block.vectors; ++v) {
    for (int quarter = 0; quarter < ceil_div(tile.count, 16) * 4; ++quarter) {
      alignas(64) std::uint32_t words[4][vector_lanes];
      for (int lane = 0; lane < vector_lanes; ++lane) {
        const int l = v * vector_lanes + lane;
        words[0][lane] = static_cast<std::uint32_t>(block.query[l] / 16 * 8 + block.query[l] % 8);
        words[1][lane] = static_cast<std::uint32_t>(tile.begin / 4 + quarter);
        words[2][lane] = static_cast<std::uint32_t>(block.batch * call.heads_q + block.head[l]);
        words[3][lane] = low(call.offset);
      }
      philox(words, low(call.seed), high(call.seed) ^ high(call.offset));
      FLASH_ATTENTION_UNROLL
      for (int right = 0; right < 2; ++right) {
        alignas(64) std::uint32_t even[vector_lanes];
        for (int lane = 0; lane < vector_lanes; ++lane) {
          even[lane] = block.query[v * vector_lanes + lane] / 8 % 2 != 0 ? words[2 + right][lane] : words[right][lane];
        }
        FLASH_ATTENTION_UNROLL
        for (int odd = 0; odd < 2; ++odd) {
          const int key = quarter / 4 * 16 + quarter % 4 * 2 + right * 8 + odd;
          if (key >= tile.count) continue;
          float* to = keep + (key * block.vectors + v) * vector_lanes;
          for (int lane = 0; lane < vector_lanes; ++lane) {
            const std::uint32_t word = odd ? even[lane] << 16 | even[lane] >> 16 : even[lane];
            to[lane] = word >= call.drop_threshold ? call.keep_scale : 0.0f;
          }
        }
      }
    }
  }
}

}  // namespace
}  // namespace flash_attention::cpu
