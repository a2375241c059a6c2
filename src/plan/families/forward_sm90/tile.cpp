#include "plan/families/forward_sm90/tile.h"

#include <algorithm>
#include <optional>

#include "plan/families/sm90.h"
#include "plan/program.h"

namespace flash_attention::plan {

int count_score_options(const abi::Features& f) {
  return int{f.bias} + int{f.mask} + int{f.dropout} + int{f.softcap} + int{f.alibi} + 2 * int{f.score_program};
}

namespace {

/// Whether there are no options, lengths, masks or left edge.
bool is_plain(const abi::Features& f) {
  return count_score_options(f) == 0 && !f.has_lengths() && !f.paged && !f.has_mask_data() && !f.mask && !f.window_left &&
         !f.entropy;  // which needs registers
}

/// The number of row tiles of all heads and sequences.
std::int64_t count_row_tiles(const Problem& p, int block_q) {
  return (p.seq_q + block_q - 1) / block_q * p.heads_q * p.batch;
}

/// For head dimensions up to 128, without options, lengths, masks or a left edge: short sequences, and so few row tiles
/// that SMs would be idle. docs/lab/forward_sm90.md, "Small problems", has the measurements (H200).
std::optional<Sm90Tile> choose_small_tile(const Request& r, std::int64_t dim, std::int64_t sms) {
  const Problem& p = r.problem;
  const bool causal = r.features.window_right;
  const std::int64_t tiles = count_row_tiles(p, 64), larger_tiles = count_row_tiles(p, 128);
  if (p.seq_q <= 128 && p.seq_kv < 512) {
    if (dim > 64) return !causal && tiles <= 2 * sms ? Sm90Tile{64, 64} : Sm90Tile{128, 64};
    return !causal && larger_tiles <= 2 * sms ? Sm90Tile{128, 64, 4} : Sm90Tile{64, 64};
  }
  if (p.seq_q < 512) {
    if (dim <= 64 && p.seq_q > 128) return Sm90Tile{64, 64};
    return dim > 64 && p.seq_kv < 512 && tiles <= 2 * sms ? std::optional<Sm90Tile>({64, 64}) : std::nullopt;
  }
  const bool few_keys = p.seq_kv <= 1024;  // with blocks of 64 the work before and after the blocks is shorter
  if (tiles <= sms) {                      // an SM for each warpgroup
    if (dim > 64) return Sm90Tile{64, 64, 4};
    return few_keys ? Sm90Tile{64, 64, 6} : Sm90Tile{64, 128, 4};
  }
  if (dim > 64) return larger_tiles <= sms ? std::optional<Sm90Tile>({128, 64, 4}) : std::nullopt;
  if (tiles <= 2 * sms && !causal && few_keys) return Sm90Tile{128, 64, 4};
  // two blocks on each SM, or a pair of tiles for each block
  if (tiles <= 2 * sms) return Sm90Tile{64, 128, causal ? 4 : 2};
  if (causal) return p.seq_q > 1024 && larger_tiles <= 4 * sms ? std::optional<Sm90Tile>({128, 128, 4}) : std::nullopt;
  // Two warpgroups take three quarters of the time of three.
  const auto rounds = [&](std::int64_t count) { return (count + sms - 1) / sms; };
  const std::int64_t largest_tiles = count_row_tiles(p, 192);
  if (largest_tiles <= 5 * sms && 3 * rounds(larger_tiles) < 4 * rounds(largest_tiles))
    return Sm90Tile{128, few_keys ? 64 : 128, 4};
  return std::nullopt;
}

/// The number of splits of the keys of each row tile, if so few tiles exist that SMs would be idle. It is the number
/// that ends first, computed from the cycles of a block of keys, of the change to another tile and of the launch that
/// merges (H200).
int count_splits(std::int64_t tiles, std::int64_t blocks, std::int64_t block_cycles, std::int64_t sms) {
  constexpr std::int64_t tile_cycles = 3500, merge_cycles = 6000, max_splits = 16, min_blocks = 8;
  const auto cycles = [&](std::int64_t splits) {
    const std::int64_t rounds = (tiles * splits + sms - 1) / sms, longest = (blocks + splits - 1) / splits;
    return rounds * (longest * block_cycles + tile_cycles) + (splits > 1 ? merge_cycles : 0);
  };
  std::int64_t best = 1;
  for (std::int64_t splits = 2; splits <= max_splits && splits * min_blocks <= blocks; ++splits) {
    if (cycles(splits) < cycles(best)) best = splits;
  }
  return 10 * cycles(best) < 9 * cycles(1) ? static_cast<int>(best) : 1;
}

/// A tile for few queries on many keys, for a plain problem.
std::optional<Sm90Tile> choose_split_tile(const Request& r, std::int64_t dim, std::int64_t sms) {
  const Problem& p = r.problem;
  if (!splits_keys(r)) return std::nullopt;
  const int block_kv = dim <= 128 ? 128 : 64;
  const std::int64_t block_cycles = dim <= 64 ? 1900 : 2400;
  const int splits = count_splits(count_row_tiles(p, 128), (p.seq_kv + block_kv - 1) / block_kv, block_cycles, sms);
  if (splits == 1) return std::nullopt;
  return Sm90Tile{128, block_kv, dim <= 64 ? 4 : 2, splits};
}

}  // namespace

bool splits_keys(const Request& r) {
  const abi::Features& f = r.features;
  const Problem& p = r.problem;
  return is_plain(f) && p.seq_q > 64 && !f.sink && !f.max_logit && !(f.window_right && p.seq_kv < 2 * p.seq_q);
}

/// docs/lab/forward_sm90.md has the measurements (H200). Options of scores and rows need registers. Such problems have
/// two warpgroups, because three have 160 registers a thread, or narrower blocks of keys.
Sm90Tile choose_sm90_tile(const Request& r) {
  const Problem& p = r.problem;
  const abi::Features& f = r.features;
  const std::int64_t dim = std::max(p.head_dim, p.head_dim_v);
  const ProgramTraits& program = r.program;
  constexpr int few_values = 12;  // of a program, in addition to S, P and O: tests/kernels/program_compile_test.cpp
  const bool masked = f.has_mask_data() || f.mask;
  const int options = count_score_options(f);
  // If a mask is the only option, it is read as words of bits (kernels/forward/sm90/mask.cuh).
  const bool loads_scores =
      f.bias || (f.mask && options > 1) || program.loads_scores || program.values > few_values;
  const bool lengths = f.has_lengths() || f.paged;
  const bool windowed = f.has_window();
  const bool plain = is_plain(f);
  const std::int64_t sms = std::max(r.device.num_sms, 1);
  if (plain) {
    if (const std::optional<Sm90Tile> split = choose_split_tile(r, dim, sms)) return *split;
  }
  if (dim > 192) return {128, options > 1 || f.bias || f.entropy ? 32 : 64};
  if (dim > 128) return {128, options > 2 ? 32 : 64};
  // 16-bit biases are stored in pairs: for 128 keys they take 32 registers, which head dimensions up to 64 can spare.
  const bool bias_alone = f.bias && size_of(p.bias.dtype) == 2 && options == 1 && !lengths && !masked;
  if (bias_alone && (dim <= 64 || has_bias_boxes(r)) && !f.window_left) return {128, 128, 4};
  if (loads_scores || (f.dropout && (options > 1 || f.window_left))) return {128, 64};
  const bool one_option = options == 1 && (f.dropout || f.softcap || f.alibi);
  if (one_option && dim <= 64 && !lengths && !masked && !f.window_left && p.seq_q >= 2048)
    // three warps on each scheduler: 5 % less time than 128 x 128
    return {192, 64, 4};
  if (f.window_left && dim > 64) return {128, 64, 4};  // 6 % fewer scores at the edges than with 128
  if (f.window_left && options == 0 && !lengths && !masked && p.seq_q >= 2048) return {192, 128, 4};
  // Three warpgroups have the registers of an entropy alone: 1.05 of forward, with 128 x 128 1.22 (H200, 8192 tokens, full).
  if (f.entropy && !f.max_logit && options == 0 && !masked && !lengths && !f.window_left && dim <= 64 && p.seq_q >= 2048)
    return {192, 128, windowed ? 4 : 2};
  if (plain) {
    if (const std::optional<Sm90Tile> small = choose_small_tile(r, dim, sms)) return *small;
    if (dim <= 64 && p.seq_q > 128)
      return windowed && p.seq_q <= 1024 ? Sm90Tile{64, 64, 3} : Sm90Tile{192, 128, windowed ? 4 : 2};
    if (windowed && p.seq_q <= 1024 && p.seq_q > 128) return {128, 64, 4};
  }
  return {128, 128, dim <= 64 ? 4 : 2};
}

}  // namespace flash_attention::plan
