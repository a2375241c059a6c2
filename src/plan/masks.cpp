#include "plan/masks.h"

#include <algorithm>
#include <string_view>

#include "abi/tile_map.h"
#include "plan/arguments.h"
#include "plan/program.h"

namespace flash_attention::plan {
namespace {

std::int64_t tiles(std::int64_t rows, std::int64_t of) { return (rows + of - 1) / of; }

void reserve(Plan& plan, std::int64_t bytes) {
  plan.workspace_bytes = (plan.workspace_bytes + 255) / 256 * 256;
  plan.workspace_offsets[abi::mask_slot] = static_cast<std::int64_t>(plan.workspace_bytes);
  plan.workspace_bytes += static_cast<std::size_t>(tiles(bytes, 256) * 256);
}

/// KeyBounds of every unit, for the CPU.
void reserve_bounds(const Problem& p, Plan& plan) {
  if (p.hidden_rows.bounds == 0) return;
  const bool packed = p.packed && p.page_size == 0;
  const std::int64_t heads = p.hidden_rows.head_stride != 0 ? p.heads_kv : 1;
  const std::int64_t units = heads * abi::unit_places(packed, p.batch, p.seq_kv, p.total_kv);
  reserve(plan, units * static_cast<std::int64_t>(sizeof(abi::KeyBounds)));
}

/// Of all maps of tiles.
std::int64_t num_map_tiles(const Problem& p) {
  return map_heads(p) * abi::map_rows(p.packed, map_batches(p), p.seq_q, p.total_q) * abi::map_units(p.seq_kv);
}

/// A map of tiles with or without bits of pairs, and the launches that make it.
void add_map(const Problem& p, Plan& plan, bool with_bits) {
  constexpr int warps = 8;
  const std::int64_t heads = map_heads(p), batches = map_batches(p), words = abi::map_words(p.seq_kv);
  const bool by_columns = plan.pass == Pass::backward;
  std::int64_t bytes = abi::map_bytes(heads, abi::map_rows(p.packed, batches, p.seq_q, p.total_q), p.seq_kv);
  if (by_columns) bytes += abi::column_bytes(heads, abi::map_rows(p.packed, batches, p.seq_kv, p.total_kv), p.seq_q);
  if (with_bits) bytes = abi::bits_begin(bytes) + num_map_tiles(p) * abi::bit_tile_words * 4 * (by_columns ? 2 : 1);
  reserve(plan, bytes);
  abi::ForwardConfig config{.num_warps = warps, .num_stages = by_columns ? 2 : 1};
  config.features.packed = p.packed;
  config.features.paged = p.page_size != 0;
  config.features.hidden_bounds = p.hidden_rows.bounds;
  config.features.block_mask = p.block_mask.block_q != 0;
  config.features.mask_program = program_traits(p).visible;
  config.features.mask = config.features.mask_map = p.mask.present;
  if (with_bits) config.features.mask_bits = by_columns ? 2 : 1;
  abi::ForwardConfig map_config = config;
  map_config.num_warps = 2 * warps;  // two units of keys to a warp
  // A counter of row tiles begins the workspace: the map sets it to 0 on its way.
  map_config.dynamic_scheduler = plan.zeroed_bytes != 0;
  plan.zeroed_bytes = 0;
  Launch map{
      .unit = "mask/tile_map", .entry = "mask_map", .config = to_source(map_config), .block = 32 * map_config.num_warps};
  map.shared_bytes = 32 * static_cast<int>(sizeof(abi::KeyBounds)) + abi::mask_map_rows * 4;
  map.grid[0] = static_cast<int>(words * abi::map_row_blocks(p.seq_q) * heads * batches);
  Launch bits{.unit = "mask/tile_bits", .entry = "mask_bits", .config = to_source(config), .block = 32 * warps};
  bits.shared_bytes = 32 * static_cast<int>(sizeof(abi::TileClass));
  bits.grid[0] = static_cast<int>(words * abi::map_units(p.seq_q) * heads * batches);
  if (with_bits) plan.launches.insert(plan.launches.begin(), std::move(bits));
  plan.launches.insert(plan.launches.begin(), std::move(map));
}

}  // namespace

bool has_tile_map(const Problem& p) {
  return p.hidden_rows.bounds != 0 || p.block_mask.block_q != 0 || program_traits(p).visible;
}

bool has_mask_bits(const Problem& p) {
  return (has_tile_map(p) || p.mask.present) && num_map_tiles(p) <= abi::max_bit_tiles;
}

std::int64_t map_heads(const Problem& p) {
  if (program_traits(p).visible_by_head) return p.heads_q;
  if (p.block_mask.block_q != 0 && p.block_mask.head_stride != 0) return p.heads_q;
  if (p.mask.present && p.mask.head_stride != 0) return p.heads_q;
  return p.hidden_rows.bounds != 0 && p.hidden_rows.head_stride != 0 ? p.heads_kv : 1;
}

std::int64_t map_batches(const Problem& p) {
  const bool differ = p.packed || (p.hidden_rows.bounds != 0 && p.hidden_rows.batch_stride != 0) ||
                      (p.block_mask.block_q != 0 && p.block_mask.batch_stride != 0) ||
                      (p.mask.present && p.mask.batch_stride != 0) || program_traits(p).visible_by_batch;
  return differ ? p.batch : std::min<std::int64_t>(p.batch, 1);
}

void prepare_masks(const Problem& p, Plan& plan) {
  if (plan.launches.empty()) return reserve_bounds(p, plan);
  const auto some_have = [&](std::string_view feature) {
    return std::ranges::any_of(plan.launches, [&](const Launch& l) { return l.config.find(feature) != std::string::npos; });
  };
  const bool bits = some_have(".mask_bits = ");
  const bool reads = bits || some_have(".hidden_bounds = ") || some_have(".block_mask = true") ||
                     some_have(".mask_map = true") || some_have(".mask_program = true");
  if (reads && p.seq_q > 0 && p.seq_kv > 0) add_map(p, plan, bits);
}

}  // namespace flash_attention::plan
