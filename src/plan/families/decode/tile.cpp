#include "plan/families/decode/tile.h"

#include <algorithm>

#include "abi/decode.h"
#include "plan/families/decode/items.h"
#include "plan/kernel_table.h"
#include "support/ceil_div.h"

namespace flash_attention::plan {
namespace {

/// The most rows of an item. Sums of wide rows leave few registers for scores, or, with 4-bit keys, for other warps. On sm_90, if each SM then has an item,
/// 16 rows are best: for each 16 rows a few tiles of keys are read from L2 once more. 8 x 64/4 x 1024 with 4 queries
/// takes 17.2 us, with 32 rows 19.1, with 64 21.6. If few SMs would have an item, 32 rows: 32 x 8/1 x 4096 with 8
/// queries 37.4 us, with 64 41.2; but 8 x 32/8 x 4096 with 16 queries 54.4 and 49.2, 64 x 64/4 x 2048 105.5 and 90.2.
std::int64_t max_rows(const Request& request) {
  const Problem& problem = request.problem;
  constexpr std::int64_t tile_keys = 128, most = 64;
  if (request.features.kv_group != 0) return std::max(problem.head_dim, problem.head_dim_v) > 128 ? 8 : 16;
  if (problem.head_dim_v > 128) return 16;
  if (request.device.arch != 90 || request.features.key_list) return most;
  const std::int64_t heads = problem.batch * problem.heads_kv, rows = decode_rows(problem), sms = request.device.num_sms;
  if (heads * ceil_div(problem.seq_kv, tile_keys) <= 2 * sms && heads * ceil_div(rows, 16) >= sms - sms / 16) return 16;
  return 9 * heads * ceil_div(rows, most) < 4 * sms ? 32 : most;
}

int block_q_of(const Request& request) {
  if (request.problem.invariant) return 16;  // in the fixed order there are no registers for the sums of more rows
  const std::int64_t most = max_rows(request);
  for (const int rows : {8, 16, 32}) {
    if (rows_of_item(request.problem, request.features) <= rows || rows == most) return rows;
  }
  return 64;
}

struct Tile {
  int block_kv;
  int num_warps;
  int max_bytes;  // of all stages
};

/// As many stages as fit in shared memory, but no more than needed to keep the memory busy.
int stages_of(abi::ForwardConfig config, int shared_bytes, int max_bytes) {
  config.num_stages = 0;
  const abi::DecodeLayout layout(config);
  return std::min(shared_bytes - layout.shared_bytes, max_bytes) / layout.stage_bytes;
}

/// Keys of a segment of the fixed order. The end of a segment costs as much as some tiles; with narrow heads, as more
/// of them. The sums of wide heads are in memory in forward/sm90.
int segment_keys(const Problem& problem) {
  const std::int64_t dims = problem.head_dim + problem.head_dim_v;
  return dims <= 128 || dims > 256 ? 2048 : 1024;
}

/// Keys that raise the maximum together in the fixed order, on GPUs that have forward/sm90: as many as its registers
/// allow. A window does not count as an option here, because a caller may leave it out in a call in which it hides
/// nothing.
int ordered_keys(const Problem& problem, const abi::Features& f) {
  const std::int64_t dim = std::max(problem.head_dim, problem.head_dim_v);
  const int options = int{f.bias} + int{f.mask} + int{f.softcap} + int{f.alibi};
  if (dim > 192) return options > 1 || f.bias ? 32 : 64;
  if (dim > 128) return options > 2 ? 32 : 64;
  return options > 1 || f.bias || f.mask ? 64 : 128;
}

/// The number of items, if the rows that may share one fit in it.
std::int64_t num_items(const Request& request) {
  const Problem& problem = request.problem;
  return problem.batch * problem.heads_kv * (request.features.key_list ? problem.seq_q : 1);
}

/// Whether blocks have long runs of few items. Then two groups of four warps take tiles in turn. Each tile has twice the
/// keys, so there are a quarter fewer instructions, which bound 8-bit keys: they take 0.87 to 0.89 of the time. 16-bit keys
/// must have the same bits and take 1.00 to 1.01 (H200, 1 x 131072, 16 x 16384, 8 x 32768); with shorter runs 1.02 to 1.05.
bool has_long_runs(const Request& request) {
  constexpr std::int64_t long_keys = 16384, long_run = 24 * 128;
  const std::int64_t keys = keys_of_item(request.problem, request.features);
  return keys >= long_keys && keys * num_items(request) >= long_run * request.device.num_sms;
}

/// Whether items have at most 128 keys, and each SM has several.
bool has_short_items(const Request& request) {
  return keys_of_item(request.problem, request.features) <= 128 && num_items(request) >= 2 * request.device.num_sms;
}

/// Whether each SM has many items, all alike. Two blocks of an SM then begin and end their items at
/// different times: 128 x 32/32 x 2048 takes 938.2 us, with one block 944.7 (cuDNN 933.8); 256 x 32/8 x 1024 248.2, 250.1.
bool has_many_items(const Request& request) {
  return abi::decode_items_are_alike(request.features) && request.features.kv_group == 0 &&
         num_items(request) >= 8 * request.device.num_sms;
}

/// Whether each SM has an item or more. If not, few items are split, and a warp's rows are merged one after another:
/// then eight warps are better (1 x 64/4 x 16384: 25.3 us, 29.6 with four).
bool has_whole_items(const Request& request) {
  return num_items(request) >= request.device.num_sms - request.device.num_sms / 16;
}

/// With 4-bit keys a block has four warps and one stage (kernels/decode/code_loader.cuh). Each block must have a tile, and
/// as many blocks must fit on an SM as its registers hold. 256 keys take fewer instructions each than 128, and wait longer
/// for memory: many warps take 128. With four blocks on an SM, 64 x 32/8 x 4096 takes 117.0 us with 256 keys and 114.1 with 128, 16 x 8192 83.9
/// and 74.4; with two, 16 x 64/4 x 8192 54.2 and 55.2 (H200, nvfp4).
std::optional<abi::ForwardConfig> configure_codes(const Request& request, int block_q) {
  const Problem& problem = request.problem;
  abi::ForwardConfig config{.features = request.features,
                            .head_dim = static_cast<int>(problem.head_dim),
                            .head_dim_v = static_cast<int>(problem.head_dim_v),
                            .block_q = block_q,
                            .num_warps = 4,
                            .group = static_cast<int>(problem.heads_q / problem.heads_kv)};
  const int shared_bytes = request.device.shared_bytes, blocks = abi::decode_group_blocks(config);
  for (const int keys : {256, 128, 64}) {
    if (blocks > 2 && keys > 128) continue;
    config.block_kv = keys;
    const double tiles = decode_tiles(problem, config);
    const bool fill = tiles >= blocks * request.device.num_sms && abi::decode_blocks_per_sm(config, shared_bytes) >= blocks;
    if (fill || (keys == 64 && abi::DecodeLayout(config).shared_bytes <= shared_bytes)) return config;
  }
  return std::nullopt;
}

/// The largest tile of which two stages fit. docs/lab/decode.md has the measurements (H200). Tiles of 128 keys with two
/// stages are -1 to 3 % faster than with three and 1 to 6 % faster than tiles of 64, even if they leave SMs without work:
/// fewer parts are merged. Eight warps are 0 to 2 % faster than four. TMA is 0 to 5 % faster with three stages; with 16
/// rows they fit with four warps only (128 x 64/4 x 1024: 79.2 us, before 84.4). Narrow heads are 1 to 25 % faster with
/// four warps and two blocks an SM, whose copies do not pause together, and so are short items (64 x 32/8 x 128: 20.1 us,
/// 22.4).
std::optional<abi::ForwardConfig> configure(const Request& request, bool producer_warp, int block_q) {
  const Problem& problem = request.problem;
  const DeviceInfo& device = request.device;
  constexpr int max_scores = 64;  // keys of a warp: more scores than that do not fit in registers
  abi::ForwardConfig config{.features = request.features,
                            .head_dim = static_cast<int>(problem.head_dim),
                            .head_dim_v = static_cast<int>(problem.head_dim_v),
                            .block_q = block_q,
                            .group = static_cast<int>(problem.heads_q / problem.heads_kv),
                            .producer_warp = producer_warp};
  const std::int64_t dims = problem.head_dim + problem.head_dim_v;
  const bool narrow = dims <= 128 && block_q <= 16, usual = dims > 128 && dims <= 256;
  // The following was measured on sm_90. With options few registers are left, and invariant bits need one way for all
  // sizes.
  const abi::Features& features = config.features;
  const bool free =
      usual && device.arch == 90 && !features.softcap && !features.bias && !features.alibi && !problem.invariant;
  const bool long_runs = free && block_q <= 16 && has_long_runs(request);
  const bool few_warps = narrow || (free && block_q == 16 && !long_runs && has_whole_items(request));
  const bool small_tiles = free && block_q <= 8 && (has_short_items(request) || has_many_items(request));
  const int max_keys = small_tiles ? 64 : 128;
  for (const Tile tile : {Tile{128, few_warps ? 4 : 8,
                               (narrow          ? 64
                                : producer_warp ? 192
                                                : 128)
                                   << 10},
                          Tile{64, 4, (max_keys == 64 ? 96 : 192) << 10}, Tile{32, 2, 192 << 10}, Tile{16, 1, 192 << 10}}) {
    if (block_q > 16 * tile.num_warps || tile.block_kv > (request.tile ? 128 : max_keys)) continue;
    if (request.tile && (request.tile->block_q != block_q || request.tile->block_kv != tile.block_kv)) continue;
    if (problem.invariant && device.arch == 90 && tile.block_kv != ordered_keys(problem, features)) continue;
    config.split_tiles = problem.invariant ? segment_keys(problem) / tile.block_kv : 0;
    config.block_kv = tile.block_kv;
    config.num_warps = tile.num_warps * (abi::DecodeLayout::splits_columns(config) ? 2 : 1);
    if (config.num_warps == 1) continue;
    config.key_groups = long_runs && tile.num_warps == 8 ? 2 : 1;
    if (config.block_kv / abi::DecodeLayout(config).tile_warps > max_scores) continue;
    // 8-bit keys have the tile of 16-bit keys, so that results have the same bits, and up to twice as many stages.
    abi::ForwardConfig wide = config;
    wide.features.kv_dtype = wide.features.dtype;
    wide.features.token_scales = false;
    if (stages_of(wide, device.shared_bytes, tile.max_bytes) < 2) continue;
    config.num_stages = std::max(2, stages_of(config, device.shared_bytes, tile.max_bytes));
    if (request.num_stages > config.num_stages) continue;
    if (request.num_stages > 1) config.num_stages = request.num_stages;
    if (abi::DecodeLayout(config).shared_bytes <= device.shared_bytes) return config;
  }
  return std::nullopt;
}

}  // namespace

std::optional<abi::ForwardConfig> choose_decode_tile(const Request& request, bool producer_warp) {
  const Problem& problem = request.problem;
  for (int block_q = block_q_of(request); block_q >= (problem.invariant ? 16 : 8); block_q /= 2) {
    const auto config =
        request.features.kv_group != 0 ? configure_codes(request, block_q) : configure(request, producer_warp, block_q);
    if (config) return config;
  }
  return std::nullopt;
}

}  // namespace flash_attention::plan
