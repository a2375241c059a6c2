#include "check/formula.h"

#include <algorithm>
#include <cmath>

namespace flash_attention::check {

bool visible(const Problem& p, const Extent& extent, std::int64_t i, std::int64_t j) {
  const std::int64_t diagonal = p.alignment == Alignment::bottom_right ? i + extent.len_kv - extent.len_q : i;
  const std::int64_t right = p.causal ? 0 : p.window_right;
  if (p.attention_chunk > 0) {  // the same chunk, counted with floors
    const auto chunk_of = [&](std::int64_t place) {
      return std::floor(static_cast<double>(place - extent.first_key) / static_cast<double>(p.attention_chunk));
    };
    if (chunk_of(diagonal) != chunk_of(j)) return false;
  }
  return i < extent.len_q && j >= extent.first_key && j < extent.end_key &&
         (p.window_left < 0 || j >= diagonal - p.window_left) && (right < 0 || j <= diagonal + right) &&
         (extent.window_left < 0 || j >= diagonal - extent.window_left) &&
         (extent.window_right < 0 || j <= diagonal + extent.window_right);
}

double tanh_of(float softcap, double score) { return std::tanh(score / softcap); }

Capped capped(float softcap, double tanh) { return {softcap * tanh, 1 - tanh * tanh}; }

bool hidden_by(const std::int32_t* bounds, int count, std::int64_t i) {
  if (count == 1) return i >= bounds[0];
  return (i >= bounds[0] && i < bounds[1]) || (count == 4 && i >= bounds[2] && i < bounds[3]);
}

bool shown_by(const BitMask& mask, const Bits& bits, const Extent& extent, std::int64_t i, std::int64_t j) {
  if (!bits.present) return true;
  std::int64_t bit = i * extent.len_kv + j;
  if (mask.kind == BitMaskKind::drafts) {
    const std::int64_t draft = j - (extent.len_kv - extent.len_q);
    if (draft < 0) return true;
    if (draft >= 8 * mask.row_bytes) return false;
    bit = 8 * mask.row_bytes * i + draft;
  }
  return bit < 8 * bits.bytes && (bits.first[bit / 8] >> bit % 8 & 1) != 0;
}

std::int64_t listed(const KeyList& list, const std::int32_t* entries, std::int64_t count, std::int64_t j) {
  std::int64_t times = 0;
  for (std::int64_t e = 0; e < count; ++e) times += entries[e] == j / list.block_kv;
  return list.kind == KeyListKind::blocks ? std::min<std::int64_t>(times, 1) : times;
}

double bounded_bias(double bias) { return std::isfinite(bias) ? std::clamp(bias, -2.3e38, 2.3e38) : bias; }

double alibi_penalty(double slope, const Extent& extent, std::int64_t i, std::int64_t j) {
  return slope * std::fabs(static_cast<double>(i + extent.len_kv - extent.len_q - j));
}

bool keeps(const Problem& p, std::uint64_t seed, std::uint64_t offset, std::int64_t b, std::int64_t head, std::int64_t i,
           std::int64_t j) {
  // Blocks of 2 x 4 scores: rows that differ in bit 3, columns that differ in bits 0 and 3.
  const auto without_bit = [](std::uint32_t x, int bit) { return (x >> (bit + 1) << bit) | (x & ((1u << bit) - 1)); };
  const auto row = static_cast<std::uint32_t>(i), column = static_cast<std::uint32_t>(j);
  std::uint32_t counter[4] = {without_bit(row, 3), without_bit(without_bit(column, 3), 0),
                              static_cast<std::uint32_t>(b * p.heads_q + head), static_cast<std::uint32_t>(offset)};
  std::uint32_t key[2] = {static_cast<std::uint32_t>(seed), static_cast<std::uint32_t>((seed >> 32) ^ (offset >> 32))};
  for (int round = 0; round < 7; ++round) {
    const std::uint64_t a = 0xD2511F53ull * counter[0], d = 0xCD9E8D57ull * counter[2];
    const std::uint32_t next[4] = {static_cast<std::uint32_t>(d >> 32) ^ counter[1] ^ key[0], static_cast<std::uint32_t>(d),
                                   static_cast<std::uint32_t>(a >> 32) ^ counter[3] ^ key[1],
                                   static_cast<std::uint32_t>(a)};
    for (int w = 0; w < 4; ++w) counter[w] = next[w];
    key[0] += 0x9E3779B9u;
    key[1] += 0xBB67AE85u;
  }
  std::uint32_t word = counter[(row >> 3 & 1) << 1 | (column >> 3 & 1)];
  if (column & 1) word = (word & 0xFFFF) << 16 | word >> 16;
  return word >= static_cast<std::uint64_t>(std::floor(static_cast<double>(p.dropout_p) * 4294967296.0));
}

double kept_factor(const Problem& p, std::uint64_t seed, std::uint64_t offset, std::int64_t b, std::int64_t head,
                   std::int64_t i, std::int64_t j) {
  if (p.dropout_p == 0) return 1;
  return keeps(p, seed, offset, b, head, i, j) ? 1 / (1 - static_cast<double>(p.dropout_p)) : 0;
}

}  // namespace flash_attention::check
