#include "plan/families/decode.h"

#include <algorithm>
#include <array>
#include <limits>
#include <optional>

#include "abi/decode.h"
#include "plan/families/portable.h"
#include "plan/families/sm90.h"
#include "plan/features.h"
#include "plan/kernel_config.h"
#include "plan/kernel_table.h"
#include "plan/workspace.h"

namespace flash_attention::plan {
namespace {

constexpr std::int64_t max_queries = 16;  // with more, a tile of rows for each query head is as good

std::int64_t ceil_div(std::int64_t a, std::int64_t b) { return (a + b - 1) / b; }

/// Even, so that parts begin at multiples of 16 bytes.
int part_rows(const Problem& problem, const abi::ForwardConfig& config) {
  if (config.split_tiles == 0) return config.block_q;
  return static_cast<int>(std::min<std::int64_t>(config.block_q, ceil_div(decode_rows(problem), 2) * 2));
}

/// Parts of each of the two items that a block shares with others.
std::int64_t parts_of_item(const Problem& problem, const abi::ForwardConfig& config, std::int64_t blocks) {
  if (config.split_tiles == 0) return 1;
  const auto share = static_cast<std::int64_t>(decode_tiles(problem, config)) / blocks + 1;
  return std::max<std::int64_t>(
      std::min<std::int64_t>(share / config.split_tiles + 2, abi::decode_splits(config, problem.seq_kv)), 1);
}

std::int64_t tiles_of_item(const Problem& problem, const abi::ForwardConfig& config) {
  return std::max<std::int64_t>(1, ceil_div(problem.seq_kv, config.block_kv));
}

std::int64_t items_of(const Problem& problem, const abi::ForwardConfig& config) {
  return problem.batch * problem.heads_kv * ceil_div(decode_rows(problem), config.block_q);
}

}  // namespace

std::int64_t decode_rows(const Problem& problem) { return problem.heads_q / problem.heads_kv * problem.seq_q; }

double decode_tiles(const Problem& problem, const abi::ForwardConfig& config) {
  const double tiles_of_keys = static_cast<double>(tiles_of_item(problem, config));
  const double items = static_cast<double>(problem.batch * problem.heads_kv) *
                       static_cast<double>(ceil_div(decode_rows(problem), config.block_q));
  return tiles_of_keys * items;
}

std::int64_t reserve_decode_parts(const Problem& problem, const abi::ForwardConfig& config, std::int64_t most, Plan& plan) {
  const auto blocks = static_cast<std::int64_t>(std::min<double>(decode_tiles(problem, config), static_cast<double>(most)));
  plan.num_splits = static_cast<int>(std::max<std::int64_t>(blocks, 1));
  if (blocks == 0) return 0;
  // decode/parts.cuh. Nothing of it needs to be set before the launch.
  using Region = abi::DecodeRegion;
  reserve(plan, Region::arrivals, blocks * 8);
  const std::int64_t part_bytes = abi::decode_part_bytes(config, part_rows(problem, config));
  const std::int64_t block_bytes = 2 * parts_of_item(problem, config, blocks) * part_bytes;
  reserve(plan, Region::parts, blocks * block_bytes);
  offset_of(plan, Region::second_part) = offset_of(plan, Region::parts) + part_bytes;
  offset_of(plan, Region::second_block) = offset_of(plan, Region::parts) + block_bytes;
  return blocks;
}

namespace {

/// Rows of an item at most. Sums of wide rows leave no registers for the scores of many. On sm_90 a few tiles of keys are
/// read for each 16 rows once more from L2, where each SM then has an item: 8 x 64/4 x 1024 with 4 queries takes 17.2 us,
/// with 32 rows 19.1, with 64 21.6. Items of which few SMs would have one have 32 rows: 32 x 8/1 x 4096 with 8 queries 37.4
/// us, with 64 41.2; but 8 x 32/8 x 4096 with 16 queries 54.4 and 49.2, 64 x 64/4 x 2048 105.5 and 90.2.
std::int64_t max_rows(const Problem& problem, const DeviceInfo& device) {
  constexpr std::int64_t tile_keys = 128, most = 64;
  if (problem.head_dim_v > 128) return 16;
  if (device.arch != 90) return most;
  const std::int64_t heads = problem.batch * problem.heads_kv, rows = decode_rows(problem), sms = device.num_sms;
  if (heads * ceil_div(problem.seq_kv, tile_keys) <= 2 * sms && heads * ceil_div(rows, 16) >= sms - sms / 16) return 16;
  return 9 * heads * ceil_div(rows, most) < 4 * sms ? 32 : most;
}

int block_q_of(const Problem& problem, const DeviceInfo& device) {
  if (problem.invariant) return 16;  // warps share keys in one way, whatever the number of rows
  const std::int64_t most = max_rows(problem, device);
  for (const int rows : {8, 16, 32}) {
    if (decode_rows(problem) <= rows || rows == most) return rows;
  }
  return 64;
}

struct Tile {
  int block_kv;
  int num_warps;
  int max_bytes;  // of all stages
};

/// As many stages as shared memory holds, but no more than keep the memory busy.
int stages_of(abi::ForwardConfig config, int shared_bytes, int max_bytes) {
  int stages = 0;
  do {
    config.num_stages = ++stages;
  } while (abi::DecodeLayout(config).shared_bytes <= shared_bytes &&
           stages * abi::DecodeLayout(config).stage_bytes <= max_bytes);
  return stages - 1;
}

/// Whether blocks have long runs of few items. Then two groups of four warps take tiles in turn, each with twice the keys
/// of a tile, in three quarters of the instructions: 8-bit keys, whose bound these are, take 0.87 to 0.89 of the time,
/// 16-bit ones, which must have the same bits, 1.00 to 1.01 (H200, 1 x 131072, 16 x 16384, 8 x 32768). With shorter
/// runs 1.02 to 1.05.
bool has_long_runs(const Problem& problem, const DeviceInfo& device) {
  constexpr std::int64_t long_keys = 16384, long_run = 24 * 128;
  return problem.seq_kv >= long_keys && problem.seq_kv * problem.batch * problem.heads_kv >= long_run * device.num_sms;
}

/// Items of 128 keys at most, several for each SM.
bool has_short_items(const Problem& problem, const DeviceInfo& device) {
  return problem.seq_kv <= 128 && problem.batch * problem.heads_kv >= 2 * device.num_sms;
}

/// An item or more for each SM: few are cut. Else a warp's rows are merged one after the other, and eight warps are better
/// (1 x 64/4 x 16384: 25.3 us, 29.6 with four).
bool has_whole_items(const Problem& problem, const DeviceInfo& device) {
  return problem.batch * problem.heads_kv >= device.num_sms - device.num_sms / 16;
}

/// The largest tile of which two stages fit. docs/lab/decode.md has the measurements (H200): tiles of 128 keys with two
/// stages are -1 to 3 % faster than with three, 1 to 6 % than tiles of 64, also where they leave SMs without work (fewer
/// parts to merge); eight warps are 0 to 2 % faster than four. TMA is 0 to 5 % faster with three stages; with 16 rows there
/// is room for them with four warps alone (128 x 64/4 x 1024: 79.2 us, before 84.4). Narrow heads are 1 to 25 % faster with
/// four warps and two blocks an SM, whose copies do not pause together, and so are short items (64 x 32/8 x 128: 20.1
/// us, 22.4).
std::optional<abi::ForwardConfig> configure(const Problem& problem, const DeviceInfo& device, bool producer_warp,
                                            int block_q) {
  constexpr int max_scores = 64;  // keys of a warp: more scores than that do not fit in registers
  abi::ForwardConfig config{.features = features_of(problem),
                            .head_dim = static_cast<int>(problem.head_dim),
                            .head_dim_v = static_cast<int>(problem.head_dim_v),
                            .block_q = block_q,
                            .group = static_cast<int>(problem.heads_q / problem.heads_kv),
                            .producer_warp = producer_warp};
  const std::int64_t dims = problem.head_dim + problem.head_dim_v;
  const bool narrow = dims <= 128 && block_q <= 16, usual = dims > 128 && dims <= 256;
  // What follows was measured on sm_90. With options few registers are left, and invariant bits have one way for all sizes.
  const abi::Features& features = config.features;
  const bool free =
      usual && device.arch == 90 && !features.softcap && !features.bias && !features.alibi && !problem.invariant;
  const bool long_runs = free && block_q <= 16 && has_long_runs(problem, device);
  const bool few_warps = narrow || (free && block_q == 16 && !long_runs && has_whole_items(problem, device));
  const int max_keys = free && block_q <= 8 && has_short_items(problem, device) ? 64 : 128;
  for (const Tile tile : {Tile{128, few_warps ? 4 : 8,
                               (narrow          ? 64
                                : producer_warp ? 192
                                                : 128)
                                   << 10},
                          Tile{64, 4, (max_keys == 64 ? 96 : 192) << 10}, Tile{32, 2, 192 << 10}}) {
    if (block_q > 16 * tile.num_warps || tile.block_kv > max_keys) continue;
    config.block_kv = tile.block_kv;
    config.num_warps = tile.num_warps;
    config.key_groups = long_runs && tile.num_warps == 8 ? 2 : 1;
    if (config.block_kv / abi::DecodeLayout(config).tile_warps > max_scores) continue;
    // 8-bit keys have the tile of 16-bit ones, so that results have the same bits, and up to twice as many stages.
    abi::ForwardConfig wide = config;
    wide.features.kv_dtype = wide.features.dtype;
    wide.features.token_scales = false;
    if (stages_of(wide, device.shared_bytes, tile.max_bytes) < 2) continue;
    config.num_stages = std::max(2, stages_of(config, device.shared_bytes, tile.max_bytes));
    if (abi::DecodeLayout(config).shared_bytes <= device.shared_bytes) return config;
  }
  return std::nullopt;
}

/// With as many rows as there are, or as few as fit.
std::optional<abi::ForwardConfig> configure(const Problem& problem, const DeviceInfo& device, bool producer_warp = false) {
  for (int block_q = block_q_of(problem, device); block_q >= (problem.invariant ? 16 : 8); block_q /= 2) {
    auto config = configure(problem, device, producer_warp, block_q);
    if (config && problem.invariant)
      config->split_tiles = static_cast<int>(invariant_split_keys(problem)) / config->block_kv;
    if (config) return config;
  }
  return std::nullopt;
}

/// Whatever the sizes are.
std::string reject_kind(const Problem& problem, const DeviceInfo& device) {
  if (device.arch < 80) return "needs sm_80";
  if (problem.dtype == Dtype::float32) return "needs a 16-bit dtype";
  if (problem.dropout_p != 0) return "takes no dropout";
  if (problem.head_dim % 8 != 0 || problem.head_dim_v % 8 != 0) return "needs head dimensions that are multiples of 8";
  if (std::max(problem.head_dim, problem.head_dim_v) > 256) return "needs head dimensions up to 256";
  if (*problem.scale <= 0) return "needs a positive scale";
  const auto multiples = [](const Strides& s, int of) { return s.batch % of == 0 && s.seq % of == 0 && s.head % of == 0; };
  for (const Strides& strides : {problem.q_strides, problem.k_strides, problem.v_strides, problem.out_strides}) {
    if (!multiples(strides, 8)) return "needs strides that are multiples of 8";
  }
  if (*problem.kv_dtype != problem.dtype) {
    if (!multiples(problem.k_strides, 16) || !multiples(problem.v_strides, 16) || problem.head_dim % 16 != 0 ||
        problem.head_dim_v % 16 != 0) {
      return "needs 8-bit rows whose strides and head_dim are multiples of 16";
    }
  }
  return configure(problem, device) ? "" : "needs more shared memory";
}

std::string reject(const Problem& problem, const DeviceInfo& device) {
  std::string reason = reject_kind(problem, device);
  if (!reason.empty()) return reason;
  if (problem.seq_q > max_queries && problem.page_size == 0 && !problem.invariant) {
    return "takes at most " + std::to_string(max_queries) + " queries of a sequence where there are no pages";
  }
  const auto config = configure(problem, device);
  return decode_tiles(problem, *config) > std::numeric_limits<int>::max() ? "more than 2^31 tiles" : "";
}

/// Kernels for many queries have five times the rate (H200: about 780 TFLOP/s against 140 here) where their tiles have all
/// their rows and there is one for each SM. Where fewer rows are in use than a fifth of that, this one is faster, which
/// splits keys: measured at 32 heads over 16384 keys, 128 queries 167 us there and 240 here, 64 queries 178 and 142.
std::string yield(const Problem& problem, const DeviceInfo& device) {
  constexpr std::int64_t tile_rows = 128, faster = 5;
  const std::int64_t mean = problem.packed ? problem.total_q / std::max<std::int64_t>(1, problem.batch) : problem.seq_q;
  const std::int64_t row_tiles = ceil_div(std::max<std::int64_t>(mean, 1), tile_rows);
  const std::int64_t at_once = std::min<std::int64_t>(row_tiles * problem.heads_q * problem.batch, device.num_sms);
  if (mean <= max_queries || faster * at_once * mean < device.num_sms * row_tiles * tile_rows) return "";
  return "more than " + std::to_string(max_queries) + " queries of a sequence: a tile of rows for each head is faster";
}

/// Boxes of a tile, or of as many rows as a page has: those begin where the swizzle does.
bool pages_are_boxes(const Problem& problem, int block_kv) {
  const std::int64_t size = problem.page_size;
  return size % block_kv == 0 || (block_kv % size == 0 && size % 8 == 0) || problem.seq_kv <= size;
}

/// The tiles of decode/sm80, so that results have the same bits, loaded by TMA.
std::string reject_sm90_decode(const Problem& problem, const DeviceInfo& device) {
  if (device.arch != 90) return "TMA needs sm_90; this is sm_" + std::to_string(device.arch);
  std::string reason = reject(problem, device);
  if (!reason.empty()) return reason;
  const auto config = configure(problem, device, true);
  if (config->block_q > 16 && is_narrow(key_type(config->features))) return "takes at most 16 rows of 8-bit keys at a time";
  if (config->num_warps % 4 != 0) return "needs whole warpgroups";
  if (problem.kv_scales == ScaleKind::token) return "takes no scales of tokens";
  if (problem.page_size != 0 && !pages_are_boxes(problem, config->block_kv)) {
    return "takes pages of 8, 16, 32, 64 and multiples of " + std::to_string(config->block_kv) + " keys";
  }
  if (has_no_key_rows(problem) || problem.seq_kv == 0) return "there is nothing to load";
  return reject_tma_cache(problem);
}

/// Blocks whose shares are whole items, or equal parts of one, where that takes at most a sixteenth of them away: fewer
/// parts are to be merged, no block waits for a longer one, and the heads of a sequence are read side by side. 128 of an
/// H200's 132 SMs read as fast as all: 16 x 32/8 x 8192 takes 132.3 us, before 136.7; 1 x 131072 134.7, 137.6; 256 x 1024
/// 257.0, 259.7.
std::int64_t even_blocks(const Problem& problem, const abi::ForwardConfig& config, std::int64_t most) {
  const auto tiles = static_cast<std::int64_t>(decode_tiles(problem, config)), of_item = tiles_of_item(problem, config);
  for (std::int64_t blocks = most; blocks > most - most / 16; --blocks) {
    const std::int64_t share = tiles / blocks;
    if (share > 0 && share * blocks == tiles && (share % of_item == 0 || of_item % share == 0)) return blocks;
  }
  return most;
}

/// Whether the items of a block are far apart, so that others read the next heads of the same keys at the same time: 64 x
/// 4096 249.9 us, 251.5 with consecutive ones; 256 x 1024 254.7, 257.0; 128 x 32/32 x 2048 950, 960. All must be whole, and
/// known.
bool strides_items(const Problem& problem, const abi::ForwardConfig& config, std::int64_t blocks) {
  const auto tiles = static_cast<std::int64_t>(decode_tiles(problem, config)), of_item = tiles_of_item(problem, config);
  return abi::decode_items_are_alike(config.features) && config.split_tiles == 0 && of_item >= 4 &&
         tiles >= 2 * blocks * of_item && tiles % (blocks * of_item) == 0;
}

/// Blocks for each item, where all are alike, or short, and there are few: 0 where shares had better go on from item to
/// item. One block knows its item without a look at the others. The blocks of a cluster must be in one part of the GPU, a
/// GPC, of which an H200 has some with less than 16 SMs: eight clusters of 16 do not fit, nor 32 of 4, but 64 of 2 do. Half
/// of the SMs read a short context as fast as all, and a cluster merges in 1.5 us less than memory does: 1 x 64/4 x 16384
/// takes 20.7 us with 64 blocks, before 25.6 with 128; 1 x 32/8 x 1024 10.2, 11.7; 1 x 8/1 x 4096 11.3, 12.8. Items whose
/// lengths are on the device may differ, which short ones can afford: 8 x 32/8 x 1024 in pages of 64 takes 19.7 us,
/// before 21.8, with lengths from 1 to 1024 15.7, 18.9. A block for each of few items has nothing to merge: 8 x 32/8 x 1024
/// takes 17.7 us, with two 18.0; with 4 queries 17.9, 19.8. Six, of two an SM: 8 x 64/4 x 8192 at head_dim 64 28.3, 31.4.
int item_blocks_of(const Problem& problem, const DeviceInfo& device, const abi::ForwardConfig& config, std::int64_t most) {
  const abi::Features& features = config.features;
  const bool lengths = features.seqused_kv || features.key_lengths || features.left_padding;
  if (device.arch != 90 || features.packed || config.split_tiles > 0) return 0;
  const bool lengths_differ = lengths && problem.batch > 1;
  const std::int64_t tiles = tiles_of_item(problem, config), items = items_of(problem, config);
  if (items == 0) return 0;  // nothing is launched
  constexpr std::int64_t short_share = 8;
  const bool two_an_sm = most > device.num_sms;
  if (!two_an_sm && tiles <= short_share && items <= most && 9 * items >= 4 * most) return 1;
  for (const std::int64_t size : {16, 8, 6, 4, 2, 1}) {
    const bool fits = size <= tiles && items * size <= (size <= 2 ? most : most * 3 / 4);
    const bool fill = size != 6 && items * size * 16 >= most * 15;  // the GPU
    const bool few = size == 6 && two_an_sm && tiles <= 2 * short_share * size && 2 * items * size >= most;
    if (fits && ((!lengths_differ && (fill || few)) || (size != 6 && tiles <= short_share * size)))
      return static_cast<int>(size);
  }
  return 0;
}

/// Whether K and V had better leave L2 first, so that what others left there stays, and is not written back meanwhile: no
/// two items have the same keys (pages may be those of a prefix that several sequences share), and there are few. 1 x 32/8
/// x 8192 (34 MB) takes 19.9 us, before 21.0, 1 x 32768 (134 MB) 46.6, 48.4; but 32 x 8/1 x 16384 (268 MB) 80.9, 78.0, and
/// 16 x 8192 (537 MB) 140.0, 132.9.
bool reads_once(const Problem& problem, const abi::ForwardConfig& config) {
  constexpr std::int64_t max_bytes = 150 << 20;
  const auto own = [](const Strides& s) { return s.batch != 0 && s.head != 0; };
  const std::int64_t width = problem.head_dim + problem.head_dim_v,
                     of_element = is_narrow(key_type(config.features)) ? 1 : 2;
  return (problem.page_size == 0 || problem.batch == 1) && config.one_row_tile && own(problem.k_strides) &&
         own(problem.v_strides) && problem.batch * problem.seq_kv * problem.heads_kv * width * of_element <= max_bytes;
}

/// Whether the blocks are shared out among the key heads first, so that the heads of the same keys are read side by side:
/// 64 x 32/8 x 4096 with lengths on the device takes 252.2 us, before 264.5; in pages of 64, lengths from 1 to 4096, 153.0,
/// 159.9.
bool has_head_grid(const Problem& problem, const DeviceInfo& device, const abi::ForwardConfig& config,
                   std::int64_t blocks) {
  return blocks > 0 && device.arch == 90 && config.item_blocks == 0 && config.split_tiles == 0 && !config.features.packed &&
         !abi::decode_items_are_alike(config.features) && problem.heads_kv > 1 && blocks % problem.heads_kv == 0;
}

/// How many tiles a block asks for at a time; 0: as many as its stages hold. 64 KB for each SM keep the memory of an H200
/// busy. With more the SMs do not get on alike, and those that read the other heads of the same keys drift apart: 64 x 32/8
/// x 4096 takes 253.2 us, with all stages 256.5; 256 x 1024 256.1, 260.2; 128 x 64/4 x 1024 78.8, 81.0. Where other heads
/// are not read side by side, twice as much (64 x 4096 in pages of 64: 260.2; with 64 KB 264.8, with all 262.8). Few SMs,
/// or a short context, need all.
int tiles_in_flight_of(const abi::ForwardConfig& config, int blocks_per_sm, bool fills_gpu) {
  const bool side_by_side = abi::decode_items_are_alike(config.features) || config.head_grid;
  const int bytes = (side_by_side ? 64 : 128) << 10;
  const int tiles = std::max(1, bytes / blocks_per_sm / abi::DecodeLayout(config).stage_bytes);
  return !config.producer_warp || config.read_once || !fills_gpu || tiles >= config.num_stages ? 0 : tiles;
}

Plan lay_out(const Problem& problem, const DeviceInfo& device, bool producer_warp) {
  abi::ForwardConfig config = *configure(problem, device, producer_warp);
  Plan plan{.block_q = config.block_q, .block_kv = config.block_kv};
  const int shared_bytes = abi::DecodeLayout(config).shared_bytes;
  const int blocks_per_sm = abi::decode_blocks_per_sm(config, device.shared_bytes);
  const std::int64_t at_once = std::min(blocks_per_sm * device.num_sms, abi::decode_max_blocks);
  config.item_blocks = item_blocks_of(problem, device, config, at_once);
  const bool shared = config.item_blocks > 0;
  const std::int64_t most = shared ? items_of(problem, config) * config.item_blocks : even_blocks(problem, config, at_once);
  config.one_row_tile = !config.features.packed && decode_rows(problem) <= config.block_q;
  config.read_once = producer_warp && reads_once(problem, config);
  config.strided_items = !shared && strides_items(problem, config, most);
  const std::int64_t blocks = reserve_decode_parts(problem, config, most, plan);
  config.head_grid = has_head_grid(problem, device, config, blocks);
  config.tiles_in_flight = tiles_in_flight_of(config, blocks_per_sm, 4 * blocks >= 3 * at_once);
  add_launch(plan,
             {.unit = producer_warp ? "decode/sm90" : "decode/sm80",
              .entry = producer_warp ? "decode_sm90" : "decode_sm80",
              .config = launch_config(config),
              .block = abi::decode_threads(config),
              .cluster = abi::decode_has_clusters(config) ? config.item_blocks : 1,
              .shared_bytes = shared_bytes,
              .min_blocks_per_sm = producer_warp ? blocks_per_sm : 1},
             blocks);
  const std::int64_t heads = problem.heads_kv;
  if (config.head_grid) plan.launches.back().grid = {static_cast<int>(blocks / heads), static_cast<int>(heads), 1};
  if (shared) {
    const std::int64_t of_head = blocks / (heads * problem.batch);
    plan.launches.back().grid = {static_cast<int>(of_head), static_cast<int>(heads), static_cast<int>(problem.batch)};
  }
  return plan;
}

Plan lay_out_sm80(const Problem& problem, const DeviceInfo& device) { return lay_out(problem, device, false); }
Plan lay_out_sm90(const Problem& problem, const DeviceInfo& device) { return lay_out(problem, device, true); }

}  // namespace

std::span<const KernelEntry> decode_kernels() {
  static const std::array<KernelEntry, 2> rows{
      KernelEntry{.name = "decode/sm90",
                  .pass = Pass::forward,
                  .device = DeviceKind::cuda,
                  .requirements =
                      "sm_90; what decode/sm80 takes, with strides that TMA can take, pages of 8, 16, 32, 64 or multiples "
                      "of a tile's keys, at most 16 rows of 8-bit keys at a time, no scales of tokens",
                  .pages = true,
                  .left_padding = true,
                  .invariant = true,
                  .narrow_keys = true,
                  .tensor_maps = TensorMapSet::decode_sm90,
                  .reject = reject_sm90_decode,
                  .lay_out = lay_out_sm90,
                  .yield = yield},
      KernelEntry{.name = "decode/sm80",
                  .pass = Pass::forward,
                  .device = DeviceKind::cuda,
                  .requirements = "sm_80; float16 or bfloat16; at most 16 queries of a sequence, any number with pages or "
                                  "invariant bits; strides that are multiples of 8; no dropout",
                  .pages = true,
                  .left_padding = true,
                  .invariant = true,
                  .narrow_keys = true,
                  .reject = reject,
                  .lay_out = lay_out_sm80,
                  .yield = yield}};
  return rows;
}

bool decode_serves_invariant(const Problem& problem, const DeviceInfo& device) {
  return problem.invariant && missing_option(decode_kernels()[1], problem).empty() && reject_kind(problem, device).empty();
}

}  // namespace flash_attention::plan
