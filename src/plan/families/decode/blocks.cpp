#include "plan/families/decode/blocks.h"

#include <algorithm>

#include "abi/decode.h"
#include "plan/families/decode/items.h"

namespace flash_attention::plan {
namespace {

/// The number of blocks, rounded down by at most a sixteenth so that each has whole items or an equal part of one. Then
/// fewer parts are merged, no block waits for a longer one, and the heads of a sequence are read side by side. 128 of
/// an H200's 132 SMs read as fast as all: 16 x 32/8 x 8192 takes 132.3 us, before 136.7; 1 x 131072 134.7, 137.6; 256 x
/// 1024 257.0, 259.7.
std::int64_t even_blocks(const Problem& problem, const abi::ForwardConfig& config, std::int64_t most) {
  const auto tiles = static_cast<std::int64_t>(decode_tiles(problem, config)), of_item = tiles_of_item(problem, config);
  for (std::int64_t blocks = most; blocks > most - most / 16; --blocks) {
    const std::int64_t share = tiles / blocks;
    if (share > 0 && share * blocks == tiles && (share % of_item == 0 || of_item % share == 0)) return blocks;
  }
  return most;
}

/// Whether the items of a block are gridDim.x apart. Other blocks then read the next heads of the same keys at the same
/// time: 64 x 4096 249.9 us, 251.5 with consecutive ones; 256 x 1024 254.7, 257.0; 128 x 32/32 x 2048 950, 960. All
/// items must be whole, and their number known.
bool strides_items(const Problem& problem, const abi::ForwardConfig& config, std::int64_t blocks) {
  const auto tiles = static_cast<std::int64_t>(decode_tiles(problem, config)), of_item = tiles_of_item(problem, config);
  return abi::decode_items_are_alike(config.features) && config.split_tiles == 0 && of_item >= 4 &&
         tiles >= 2 * blocks * of_item && tiles % (blocks * of_item) == 0;
}

/// The number of blocks for each item, if items are few, and of equal length or short; 0: blocks share all tiles
/// evenly. With such a number a block knows its item without reading other lengths. A cluster must be in one GPC, and
/// some GPCs of an H200 have fewer than 16 SMs: eight clusters of 16 do not fit, nor 32 of 4, but 64 of 2 do. Half of
/// the SMs read a short context as fast as all, and a cluster merges in 1.5 us less than memory does: 1 x 64/4 x 16384
/// takes 20.7 us with 64 blocks, before 25.6 with 128; 1 x 32/8 x 1024 10.2, 11.7; 1 x 8/1 x 4096 11.3, 12.8. If
/// lengths are on the device, items may differ in length. Short items can afford that: 8 x 32/8 x 1024 in pages of 64
/// takes 19.7 us, before 21.8, with lengths from 1 to 1024 15.7, 18.9. With one block an item there is nothing to
/// merge: 8 x 32/8 x 1024 takes 17.7 us, with two 18.0; with 4 queries 17.9, 19.8. Six, of two an SM: 8 x 64/4 x 8192
/// at head_dim 64 28.3, 31.4.
int item_blocks_of(const Problem& problem, const DeviceInfo& device, const abi::ForwardConfig& config, std::int64_t most) {
  const abi::Features& features = config.features;
  const bool lengths = features.seqused_kv || features.key_lengths || features.left_padding;
  if (device.arch != 90 || features.packed) return 0;
  const bool lengths_differ = lengths && problem.batch > 1;
  const std::int64_t tiles = tiles_of_item(problem, config), items = items_of(problem, config);
  if (items == 0) return 0;  // nothing is launched
  if (abi::has_fixed_order(config)) return tiles <= config.split_tiles && items <= most ? 1 : 0;  // one segment each
  constexpr std::int64_t short_share = 8;
  const bool two_an_sm = most > device.num_sms;
  if (!two_an_sm && tiles <= short_share && items <= most && 9 * items >= 4 * most) return 1;
  for (const std::int64_t size : {16, 8, 6, 4, 2, 1}) {
    const bool fits = size <= tiles && items * size <= (size <= 2 ? most : most * 3 / 4);
    const bool fill = size != 6 && items * size * 16 >= most * 15;  // fill the GPU
    const bool few = size == 6 && two_an_sm && tiles <= 2 * short_share * size && 2 * items * size >= most;
    if (fits && ((!lengths_differ && (fill || few)) || (size != 6 && tiles <= short_share * size)))
      return static_cast<int>(size);
  }
  return 0;
}

/// Whether L2 should evict K and V first, so that other data stays there and is not written back meanwhile. No two items
/// may have the same keys (sequences may share pages), and K and V must be small. 1 x 32/8 x 8192 (34 MB) takes 19.9 us,
/// before 21.0, 1 x 32768 (134 MB) 46.6, 48.4; but 32 x 8/1 x 16384 (268 MB) 80.9, 78.0, and 16 x 8192 (537 MB) 140.0,
/// 132.9.
bool reads_once(const Problem& problem, const abi::ForwardConfig& config) {
  constexpr std::int64_t max_bytes = 150 << 20;
  const auto own = [](const Strides& s) { return s.batch != 0 && s.head != 0; };
  const std::int64_t width = problem.head_dim + problem.head_dim_v,
                     of_element = is_narrow(key_type(config.features)) ? 1 : 2;
  return (problem.page_size == 0 || problem.batch == 1) && config.one_row_tile && own(problem.k_strides) &&
         own(problem.v_strides) && problem.batch * problem.seq_kv * problem.heads_kv * width * of_element <= max_bytes;
}

/// Whether the blocks are divided among the key heads first. The heads of the same keys are then read side by side: 64 x
/// 32/8 x 4096 with lengths on the device takes 252.2 us, before 264.5; in pages of 64, lengths from 1 to 4096, 153.0,
/// 159.9.
bool has_head_grid(const Problem& problem, const DeviceInfo& device, const abi::ForwardConfig& config,
                   std::int64_t blocks) {
  return blocks > 0 && device.arch == 90 && config.item_blocks == 0 && config.split_tiles == 0 && !config.features.packed &&
         !abi::decode_items_are_alike(config.features) && problem.heads_kv > 1 && blocks % problem.heads_kv == 0;
}

/// How many tiles a block loads at a time; 0: as many as its stages hold. 64 KB for each SM keep the memory of an H200
/// busy. With more, some SMs get ahead, and those that read other heads of the same keys drift apart: 64 x 32/8 x 4096
/// takes 253.2 us, with all stages 256.5; 256 x 1024 256.1, 260.2; 128 x 64/4 x 1024 78.8, 81.0. If other heads are not
/// read side by side, twice as much is best (64 x 4096 in pages of 64: 260.2; with 64 KB 264.8, with all 262.8). Few SMs,
/// or a short context, need all.
int tiles_in_flight_of(const abi::ForwardConfig& config, int blocks_per_sm, bool fills_gpu) {
  const bool side_by_side = abi::decode_items_are_alike(config.features) || config.head_grid;
  const int bytes = (side_by_side ? 64 : 128) << 10;
  const int tiles = std::max(1, bytes / blocks_per_sm / abi::DecodeLayout(config).stage_bytes);
  return !config.producer_warp || config.read_once || !fills_gpu || tiles >= config.num_stages ? 0 : tiles;
}

}  // namespace

std::int64_t share_decode_items(const Problem& problem, const DeviceInfo& device, abi::ForwardConfig& config, Plan& plan) {
  const int blocks_per_sm = abi::decode_blocks_per_sm(config, device.shared_bytes);
  const std::int64_t at_once = std::min(blocks_per_sm * device.num_sms, abi::decode_max_blocks(config.features));
  config.item_blocks = item_blocks_of(problem, device, config, at_once);
  const bool shared = config.item_blocks > 0;
  const std::int64_t most = shared ? items_of(problem, config) * config.item_blocks : even_blocks(problem, config, at_once);
  config.one_row_tile = !config.features.packed && items_of(problem, config) == problem.batch * problem.heads_kv;
  config.read_once = config.producer_warp && reads_once(problem, config);
  config.strided_items = !shared && strides_items(problem, config, most);
  const std::int64_t blocks = reserve_decode_parts(problem, config, most, plan);
  config.head_grid = has_head_grid(problem, device, config, blocks);
  config.tiles_in_flight = tiles_in_flight_of(config, blocks_per_sm, 4 * blocks >= 3 * at_once);
  return blocks;
}

}  // namespace flash_attention::plan
