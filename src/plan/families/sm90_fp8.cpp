#include <algorithm>
#include <array>

#include "abi/forward_sm90.h"
#include "abi/forward_sm90_fp8.h"
#include "abi/tensor_maps.h"
#include "plan/families/portable.h"
#include "plan/families/sm90.h"
#include "plan/features.h"
#include "plan/kernel_config.h"
#include "plan/kernel_table.h"
#include "plan/tensor_maps.h"
#include "plan/workspace.h"

namespace flash_attention::plan {
namespace {

struct Tile {
  int block_q;
  int block_kv;
  int num_stages = 2;
};

/// Whether nothing but a causal mask, lengths and a sink has an effect on scores.
bool plain(const abi::Features& f) { return !f.modifies_scores() && !f.window_left && !f.left_padding && !f.paged; }

/// A thread has 240 registers, with three warpgroups 160. S, P and O take block_kv / 2 + block_kv / 8 + head_dim_v / 2 of
/// them. A bias, a soft cap, slopes or a left edge need some more. docs/lab/forward_sm90_fp8.md.
Tile choose_tile(const Request& r) {
  const Problem& p = r.problem;
  const abi::Features& f = r.features;
  const std::int64_t dim = std::max(p.head_dim, p.head_dim_v), tiles_of_192 = (p.seq_q + 191) / 192 * p.heads_q * p.batch;
  // Short rows need no sums in fp32. H200, TFLOP/s, full / causal, 2048 keys: 256 columns, 128 x 96 and 128 x 64 1015 / 832
  // and 1001 / 790; 128 columns, 192 x 96 and 128 x 192 851 / 695 and 819 / 647 (8192 keys: 970 / 836 and 975 / 893).
  const bool is_short = plain(f) && p.seq_kv <= abi::forward_sm90_fp8_sum_keys;
  if (dim > 128) return {128, is_short ? 96 : 64};
  if (f.bias) return {128, size_of(p.bias.dtype) == 4 || f.softcap || f.alibi ? 64 : 128};
  // H200, 64 columns, TFLOP/s, full / causal, of 192 x 128 and 128 x 192: 2048 keys 561 / 457 and 500 / 402, 8192 keys
  // 655 / 583 and 581 / 543.
  if (dim <= 64 && tiles_of_192 >= r.device.num_sms) return {192, 128};
  if (is_short && tiles_of_192 >= r.device.num_sms) return {192, 96};
  if (f.softcap || f.alibi || f.window_left || f.paged) return {128, 128};
  return {128, 192};
}

/// Whether idle warps transpose V of later heads while tiles of earlier ones are computed. With fewer rows a head they
/// would be late, and of longer sequences the transposition is a small part. H200, 2048 keys, causal, TFLOP/s with and
/// without: 64 columns 459 and 448, 128 647 and 638; 8192 keys 571 and 571, 893 and 898.
bool transposes_late(const Problem& p, const abi::ForwardConfig& config, std::int64_t blocks) {
  constexpr std::int64_t fewest_rows = 1024, most_keys = 4096;
  const std::int64_t group = p.heads_q / p.heads_kv;
  return plain(config.features) && p.seq_q * group >= fewest_rows && p.seq_kv <= most_keys &&
         abi::forward_sm90_fp8_first_heads(config, p.seq_q, p.heads_kv, static_cast<int>(group), p.batch, blocks) <
             p.heads_kv * p.batch;
}

abi::ForwardConfig config_of(const Request& r, const Tile& tile) {
  const Problem& p = r.problem;
  const std::int64_t row_tiles = (p.seq_q + tile.block_q - 1) / tile.block_q;
  abi::ForwardConfig config{
      .features = features_of(p),
      .head_dim = static_cast<int>(p.head_dim),
      .head_dim_v = static_cast<int>(p.head_dim_v),
      .block_q = tile.block_q,
      .block_kv = tile.block_kv,
      .num_warps = (tile.block_q / 64 + 1) * 4,
      .num_stages = tile.num_stages,
      .page_rows = p.page_size != 0 ? rows_of_page_box(p, tile.block_kv) : 0};
  // Under a causal mask row tiles differ in length: a block takes a long and a short one as a pair.
  config.pair_tiles = config.features.window_right && !config.features.window_left && row_tiles > 1;
  config.loop.key_order = choose_key_order(config);
  const std::int64_t units = (config.pair_tiles ? (row_tiles + 1) / 2 : row_tiles) * p.heads_q * p.batch;
  config.transposes_late = transposes_late(p, config, std::min<std::int64_t>(units, r.device.num_sms));
  // As many tiles of biases as fit, at most three.
  config.bias_stages = has_bias_boxes(r) ? 3 : 0;
  while (config.bias_stages > 0 && abi::forward_sm90_fp8_layout(config).shared_bytes > abi::forward_sm90_max_shared_bytes)
    --config.bias_stages;
  return config;
}

/// The largest V^T of keys in pages: the lengths are not known to the planner, and a table has room for the longest.
constexpr std::int64_t most_paged_bytes = std::int64_t{1} << 30;

/// The options that other kernels take, by name.
std::string reject_options(const abi::Features& f) {
  if (f.mask) return "takes no boolean mask";
  if (f.dropout) return "takes no dropout";
  if (f.token_scales) return "takes no scales of rows";
  return {};
}

std::string reject(const Request& r) {
  const Problem& p = r.problem;
  if (*p.q_dtype == p.dtype) return "takes queries of float8_e4m3 or float8_e5m2";
  if (std::max(p.head_dim, p.head_dim_v) > 256) return "takes a head_dim of at most 256";
  std::string reason = reject_sm90(p, r.device);
  if (reason.empty()) reason = reject_options(r.features);
  if (reason.empty() && !(*p.scale > 0)) reason = "scale must be positive: the maximum is taken before scaling";
  if (reason.empty() && p.page_size % 8 != 0) {
    reason = "TMA brings pages in boxes of 8 keys or more: page_size must be a multiple of 8, got " +
             std::to_string(p.page_size);
  }
  if (reason.empty() && p.page_size != 0 && p.batch * p.heads_kv * p.seq_kv * p.head_dim_v > most_paged_bytes) {
    reason = "transposes V of all keys for which the page table has room, here more than 1 GiB";
  }
  if (reason.empty()) reason = reject_tma_strides(p, Pass::forward);
  if (reason.empty() && p.v_strides.seq >= std::int64_t{1} << 27) reason = "takes rows of v less than 128 MiB apart";
  return reason;
}

std::string reject_tile(const Request& r, const TileSize& asked) {
  const Problem& p = r.problem;
  const auto [block_q, block_kv] = asked;
  const std::int64_t dim = std::max(p.head_dim, p.head_dim_v);
  if (block_q == 192 && (dim > 128 || block_kv > (dim > 64 ? 96 : 128)))
    return "192 queries take up to 128 keys up to a head_dim of 64, and up to 96 up to 128";
  if (block_q != 128 && block_q != 192) return "allowed are 128 and 192 queries";
  if (block_kv != 64 && block_kv != 96 && block_kv != 128 && block_kv != 160 && block_kv != 192) {
    return "allowed are 64, 96, 128, 160 and 192 keys";
  }
  if (block_kv > 96 && dim > 128) return "more than 96 keys fit in registers up to a head_dim of 128";
  const abi::ForwardConfig config = config_of(r, {block_q, block_kv});
  if (!abi::forward_sm90_fp8_keeps_sums(config) && p.seq_kv > abi::forward_sm90_fp8_sum_keys)
    return "of more than 2304 keys it keeps sums in fp32, for which such tiles have no room";
  return abi::forward_sm90_fp8_layout(config).shared_bytes <= r.device.shared_bytes ? "" : "it does not fit in shared memory";
}

bool packs_values(const Problem& p) { return p.packed && p.page_size == 0; }

long long transposed_places_of(const Problem& p, int block_kv) {
  return abi::transposed_places(packs_values(p), p.batch, p.seq_kv, p.total_kv, block_kv);
}

Plan lay_out(const Request& r, const Tile& tile) {
  const Problem& p = r.problem;
  Plan plan{.block_q = tile.block_q, .block_kv = tile.block_kv};
  const abi::ForwardConfig config = config_of(r, tile);
  const long long places = transposed_places_of(p, tile.block_kv);
  reserve(plan, abi::ForwardSm90Fp8Region::transposed_V,
          places * p.head_dim_v * p.heads_kv * (packs_values(p) ? 1 : p.batch));
  plan.maps = forward_sm90_fp8_maps(p, plan);
  if (config.bias_stages > 0) plan.maps.push_back(bias_map(abi::forward_sm90_fp8_maps::map_bias, p, tile.block_kv));

  const std::int64_t row_tiles = (p.seq_q + tile.block_q - 1) / tile.block_q, heads = p.heads_kv * p.batch;
  const std::int64_t units = (config.pair_tiles ? (row_tiles + 1) / 2 : row_tiles) * p.heads_q * p.batch;
  const std::int64_t blocks = std::min<std::int64_t>(units, r.device.num_sms);
  if (config.transposes_late || p.page_size != 0) {
    constexpr int threads = abi::forward_sm90_fp8_job_threads;
    if (config.transposes_late)
      reserve(plan, abi::ForwardSm90Fp8Region::progress, (1 + heads) * static_cast<std::int64_t>(sizeof(unsigned)));
    const auto group = static_cast<int>(p.heads_q / p.heads_kv);
    add_launch(plan,
               {.unit = "forward/sm90_fp8",
                .entry = "forward_sm90_fp8_transpose_jobs",
                .config = launch_config(config),
                .block = threads},
               config.transposes_late
                   ? abi::forward_sm90_fp8_first_heads(config, p.seq_q, p.heads_kv, group, p.batch, blocks)
                   : heads);
    const auto jobs = abi::forward_sm90_fp8_jobs_of_head(p.seq_kv, tile.block_kv);
    plan.launches.back().grid[1] = static_cast<int>((jobs * 32 + threads - 1) / threads);
  } else {
    constexpr std::int64_t transposed_keys = abi::forward_sm90_fp8_transposed_keys;
    const std::int64_t blocks_kv = (p.seq_kv + tile.block_kv - 1) / tile.block_kv * tile.block_kv;
    add_launch(plan,
               {.unit = "forward/sm90_fp8",
                .entry = "forward_sm90_fp8_transpose",
                .config = launch_config(config),
                .block = 256,
                .shared_bytes = abi::forward_sm90_fp8_transpose_bytes},
               (blocks_kv + transposed_keys - 1) / transposed_keys * heads);
  }
  add_launch(plan,
             {.unit = "forward/sm90_fp8",
              .entry = "forward_sm90_fp8_kernel",
              .config = launch_config(config),
              .block = config.num_warps * 32,
              .shared_bytes = abi::forward_sm90_fp8_layout(config).shared_bytes},
             blocks);
  return plan;
}

Answer plan_fp8(const Request& r) {
  std::string reason = reject(r);
  if (!reason.empty()) return Refusal{std::move(reason)};
  if (!r.tile) return Offer{lay_out(r, choose_tile(r))};
  reason = reject_tile(r, *r.tile);
  if (!reason.empty()) return refuse_tile(*r.tile, reason);
  return Offer{lay_out(r, Tile{r.tile->block_q, r.tile->block_kv})};
}

/// The map of V^T, which the first launch writes: [places, dim, heads, batch] in boxes of a chunk of places and all
/// columns.
MapLayout transposed_map(int slot, const Problem& p, const Plan& plan) {
  const std::int64_t places = transposed_places_of(p, plan.block_kv);
  const auto chunk = static_cast<std::uint32_t>(abi::forward_sm90_fp8_v_chunk(plan.block_kv));
  MapLayout map{.slot = slot,
                .source = MapSource::workspace,
                .offset = offset_of(plan, abi::ForwardSm90Fp8Region::transposed_V),
                .dtype = *p.kv_dtype,
                .rank = 4};
  const std::int64_t sizes[4] = {places, p.head_dim_v, p.heads_kv, packs_values(p) ? 1 : p.batch};
  std::int64_t stride = 1;
  for (std::size_t i = 0; i < 4; ++i) {
    map.sizes[i] = static_cast<std::uint64_t>(sizes[i]);
    stride *= sizes[i];
    if (i < 3) map.strides_bytes[i] = static_cast<std::uint64_t>(stride);
  }
  map.box = {chunk, static_cast<std::uint32_t>((p.head_dim_v + 31) / 32 * 32), 1, 1};
  map.swizzle_bytes = static_cast<int>(chunk);
  return map;
}

}  // namespace

std::vector<MapLayout> forward_sm90_fp8_maps(const Problem& p, const Plan& plan) {
  using enum MapSource;
  using namespace abi::forward_sm90_fp8_maps;
  MapRows queries = query_rows(p, q, p.q_strides, p.head_dim);
  queries.dtype = *p.q_dtype;
  const int keys_of_box = p.page_size != 0 ? rows_of_page_box(p, plan.block_kv) : plan.block_kv;
  return {rows_map(map_Q, queries, map_warpgroup_rows),
          rows_map(map_K, key_rows(p, k, p.k_strides, p.head_dim), keys_of_box), transposed_map(map_V, p, plan),
          rows_map(map_O, query_rows(p, out, p.out_strides, p.head_dim_v), map_warpgroup_rows)};
}

std::span<const KernelEntry> sm90_fp8_kernels() {
  static const std::array<KernelEntry, 1> rows{KernelEntry{
      .name = "forward/sm90_fp8",
      .pass = Pass::forward,
      .device = DeviceKind::cuda,
      .requirements = "sm_90; q, k and v of float8_e4m3 or float8_e5m2, out of float16 or bfloat16; strides that "
                      "TMA can take; causal, windows, softcap, ALiBi, a bias, sinks, packed, lengths, pages of a "
                      "multiple of 8 keys",
      .takes = {.pages = true, .narrow_keys = true, .narrow_queries = true, .tile = true},
      .proven = run_on_h200,
      .plan = plan_fp8}};
  return rows;
}

}  // namespace flash_attention::plan
