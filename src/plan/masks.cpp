#include "plan/masks.h"

#include <algorithm>
#include <utility>

#include "abi/tile_map.h"
#include "plan/families/cpu_regions.h"
#include "plan/families/sm90.h"
#include "plan/features.h"
#include "plan/kernel_config.h"
#include "plan/workspace.h"

namespace flash_attention::plan {
namespace {

/// Reserves KeyBounds of every unit, for the CPU.
void reserve_bounds(const Request& r, Plan& plan) {
  const Problem& p = r.problem;
  if (r.features.hidden_bounds == 0) return;
  const bool packed = p.packed && p.page_size == 0;
  const std::int64_t heads = p.hidden_rows.head_stride != 0 ? p.heads_kv : 1;
  const std::int64_t units = heads * abi::unit_places(packed, p.batch, p.seq_kv, p.total_kv);
  reserve(plan, CpuRegion::masks, units * static_cast<std::int64_t>(sizeof(abi::KeyBounds)));
}

/// For backward/sm90, if it reads words: adds the launch that makes them, after the launch of the map, whose
/// configuration is `config`.
void add_mask_bits(const Problem& p, abi::ForwardConfig config, Plan& plan) {
  const auto reads = [](const Launch& launch) {
    const auto* const reader = config_of<abi::BackwardConfig>(launch);
    return reader != nullptr && reader->mask_bits;
  };
  if (std::none_of(plan.launches.begin(), plan.launches.end(), reads)) return;
  reserve(plan, abi::BackwardSm90Region::mask_words, step_word_bytes(p));  // after the map, and kept with it
  plan.mask.launches = 2;
  config.num_warps = 4 * abi::mask_bits_threads / 32;
  Launch launch{.unit = "mask/mask_bits",
                .entry = "compute_mask_bits",
                .config = launch_config(config),
                .block = 32 * config.num_warps};
  const std::int64_t rows = (p.seq_q + abi::mask_unit - 1) / abi::mask_unit;
  launch.grid[0] = static_cast<int>(abi::mask_bits_blocks * rows * map_heads(p) * map_batches(p));
  plan.launches.insert(plan.launches.begin() + 1, std::move(launch));
}

/// Adds a map of tiles, and the launch that makes it.
void add_map(const Request& r, Plan& plan) {
  const Problem& p = r.problem;
  const abi::Features& f = r.features;
  int warps = f.mask ? 32 : 8;  // four warps read a row of tiles of a boolean mask
  const std::int64_t heads = map_heads(p), batches = map_batches(p), words = abi::map_words(p.seq_kv);
  const std::int64_t rows = abi::map_rows(p.packed, batches, p.seq_q, p.total_q);
  std::int64_t bytes = heads * rows * words * static_cast<std::int64_t>(sizeof(abi::TileWords));
  const bool by_columns = plan.pass == Pass::backward;
  if (by_columns) {
    bytes += heads * abi::map_rows(p.packed, batches, p.seq_kv, p.total_kv) * abi::map_words(p.seq_q) *
             static_cast<std::int64_t>(sizeof(unsigned));
  }
  reserve(plan, abi::SharedRegion::masks, bytes);
  plan.mask = {.present = true, .begin = static_cast<std::size_t>(offset_of(plan, abi::SharedRegion::masks))};
  abi::ForwardConfig config{.num_warps = warps, .num_stages = by_columns ? 2 : 1};
  config.features.packed = f.packed;
  config.features.paged = f.paged;
  config.features.hidden_bounds = f.hidden_bounds;
  config.features.block_mask = f.block_mask;
  config.features.mask_program = f.mask_program;
  config.features.mask = config.features.mask_map = f.mask;
  for (const Launch& launch : plan.launches) {
    const auto* reader = config_of<abi::ForwardConfig>(launch);
    if (reader == nullptr || !reader->dynamic_scheduler) continue;
    config.dynamic_scheduler = true;  // it sets the counter to 0, which then needs no other launch
    plan.mask.zeroed_bytes = std::exchange(plan.zeroed_bytes, 0);
    if (!reader->features.precomputed_mask_bits) continue;
    plan.mask.begin = static_cast<std::size_t>(offset_of(plan, abi::ForwardSm90Region::mask_words));
    config.block_q = reader->block_q, config.block_kv = reader->block_kv;  // the tiles of its words
    config.num_warps = warps = 16;
    if (f.has_lengths() || f.sequence_windows)
      continue;  // the edges of windows differ by sequence, so all blocks have words
    config.features.window_left = reader->features.window_left;
    config.features.window_right = reader->features.window_right;
    config.features.chunk = reader->features.chunk;
    config.features.top_left = reader->features.top_left;
  }
  const bool makes_words = config.block_kv != 0;
  const abi::MapBytes from_bytes = abi::map_bytes(config.features, makes_words);
  Launch launch{.unit = "mask/tile_map", .entry = "mask_map", .config = launch_config(config), .block = 32 * warps};
  const int rows_of_block = abi::mask_map_rows(makes_words, from_bytes, config.block_q, p.seq_q, p.seq_kv);
  launch.shared_bytes = 32 * static_cast<int>(sizeof(abi::KeyBounds)) +
                        (config.features.mask_program ? 32 * abi::seen_keys_bytes : 32) +
                        (abi::max_map_rows + warps) * static_cast<int>(sizeof(abi::TileWords));
  std::int64_t blocks = words * abi::mask_map_row_blocks(makes_words, rows_of_block, p.seq_q);
  if (abi::map_by_program(config.features, makes_words)) {
    const int tiles = abi::program_map_blocks(config.block_q, p.seq_q, p.seq_kv);
    blocks = static_cast<std::int64_t>(tiles) * abi::program_map_parts(tiles);
    launch.shared_bytes = abi::program_map_bytes;
    launch.min_blocks_per_sm = 2;
  }
  launch.grid[0] = static_cast<int>(blocks * heads * batches);
  plan.launches.insert(plan.launches.begin(), std::move(launch));
  add_mask_bits(p, config, plan);
}

/// A map of tiles that lists of blocks show, and the launch that makes it. Lists change from call to call: it is no
/// prepared mask.
void add_list_map(const Request& r, Plan& plan) {
  const Problem& p = r.problem;
  const auto reads_bits = [](const Launch& launch) {
    const abi::Features* const f = features_of(launch);
    return f != nullptr && f->list_bits != 0;
  };
  const abi::Features& reader = *features_of(*std::ranges::find_if(plan.launches, reads_bits));
  const bool by_columns = plan.pass == Pass::backward;
  const std::int64_t stacked = std::max(reader.stacked_heads, 1), lists = p.batch * p.key_list.heads;
  const std::int64_t rows = (p.seq_q * stacked + abi::mask_unit - 1) / abi::mask_unit, words = abi::map_words(p.seq_kv);
  const std::int64_t row_words = abi::map_words(p.seq_q * stacked);
  const std::int64_t columns = by_columns ? (p.seq_kv + abi::mask_unit - 1) / abi::mask_unit : 0;
  reserve(plan, abi::SharedRegion::masks,
          lists * (rows * words * static_cast<std::int64_t>(sizeof(abi::TileWords)) + columns * row_words * 4));
  abi::ForwardConfig config{.num_warps = 4};
  config.features.seqused_kv = r.features.seqused_kv;
  config.features.list_bits = reader.list_bits;
  config.features.list_of_query = reader.list_of_query;
  config.features.stacked_heads = reader.stacked_heads;
  const auto add = [&](int place, const char* entry, std::int64_t blocks, int shared_bytes) {
    Launch launch{.unit = "mask/list_map",
                  .entry = entry,
                  .config = launch_config(config),
                  .block = 32 * config.num_warps,
                  .shared_bytes = shared_bytes};
    launch.grid[0] = static_cast<int>(blocks);
    plan.launches.insert(plan.launches.begin() + place, std::move(launch));
  };
  add(0, "mask_list_map", lists * rows, static_cast<int>(abi::mask_unit / stacked) * 32 * 4);
  if (by_columns) add(1, "mask_list_columns", (lists * row_words * words + config.num_warps - 1) / config.num_warps, 0);
}

}  // namespace

void prepare_masks(const Request& r, Plan& plan) {
  const Problem& p = r.problem;
  if (plan.launches.empty()) return reserve_bounds(r, plan);
  const auto reads_map = [](const Launch& launch) {
    const abi::Features* f = features_of(launch);
    return f != nullptr && f->has_tile_map();
  };
  const bool reads = std::any_of(plan.launches.begin(), plan.launches.end(), reads_map);
  if (!reads || p.seq_q == 0 || p.seq_kv == 0) return;
  r.features.key_list ? add_list_map(r, plan) : add_map(r, plan);
}

std::size_t needed_workspace(const Plan& plan, const PreparedMask& prepared) {
  return plan.mask.present && prepared.data != nullptr ? plan.mask.begin : plan.workspace_bytes;
}

std::size_t prepared_bytes(const Plan& plan) {
  return plan.mask.present ? prepared_head_bytes + plan.workspace_bytes - plan.mask.begin : 0;
}

Plan preparation(const Plan& plan) {
  Plan map = plan;
  map.launches.resize(static_cast<std::size_t>(plan.mask.launches));
  map.mask.present = false;
  map.maps.clear();
  map.zeroed_bytes = 0;
  return map;
}

}  // namespace flash_attention::plan
