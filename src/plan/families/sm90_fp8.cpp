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

/// A thread has 240 registers. S, P and O take block_kv / 2 + block_kv / 8 + head_dim_v / 2 of them. A soft cap, slopes
/// or a left edge need some more. docs/lab/forward_sm90_fp8.md.
Tile choose_tile(const Request& r) {
  const Problem& p = r.problem;
  const std::int64_t dim = std::max(p.head_dim, p.head_dim_v);
  if (dim > 128) return {128, 64};
  // With three warpgroups a thread has 160 registers, of which 112 hold S, P and O. H200, 64 columns, TFLOP/s, full /
  // causal, of 192 x 128 and 128 x 192: 2048 keys 561 / 457 and 500 / 402, 8192 keys 655 / 583 and 581 / 543.
  const std::int64_t tiles_of_192 = (p.seq_q + 191) / 192 * p.heads_q * p.batch;
  if (dim <= 64 && tiles_of_192 >= r.device.num_sms) return {192, 128};
  if (r.features.softcap || r.features.alibi || r.features.window_left) return {128, 128};
  return {128, 192};
}

abi::ForwardConfig config_of(const Problem& p, const Tile& tile) {
  const std::int64_t row_tiles = (p.seq_q + tile.block_q - 1) / tile.block_q;
  abi::ForwardConfig config{
      .features = features_of(p),
      .head_dim = static_cast<int>(p.head_dim),
      .head_dim_v = static_cast<int>(p.head_dim_v),
      .block_q = tile.block_q,
      .block_kv = tile.block_kv,
      .num_warps = (tile.block_q / 64 + 1) * 4,
      .num_stages = tile.num_stages};
  // Under a causal mask row tiles differ in length: a block takes a long and a short one as a pair.
  config.pair_tiles = config.features.window_right && !config.features.window_left && row_tiles > 1;
  config.loop.key_order = choose_key_order(config);
  return config;
}

/// The options that other kernels take, by name.
std::string reject_options(const abi::Features& f) {
  if (f.bias) return "takes no bias";
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
  if (reason.empty()) reason = reject_tma_strides(p, Pass::forward);
  return reason;
}

std::string reject_tile(const Problem& p, const DeviceInfo& device, const TileSize& asked) {
  const auto [block_q, block_kv] = asked;
  const std::int64_t dim = std::max(p.head_dim, p.head_dim_v);
  if (block_q == 192 && (dim > 64 || block_kv > 128)) return "192 queries take a head_dim of up to 64 and up to 128 keys";
  if (block_q != 128 && block_q != 192) return "allowed are 128 and 192 queries";
  if (block_kv != 64 && block_kv != 96 && block_kv != 128 && block_kv != 160 && block_kv != 192) {
    return "allowed are 64, 96, 128, 160 and 192 keys";
  }
  if (block_kv > 96 && dim > 128) return "more than 96 keys fit in registers up to a head_dim of 128";
  const abi::ForwardConfig config = config_of(p, {block_q, block_kv});
  return abi::forward_sm90_fp8_layout(config).shared_bytes <= device.shared_bytes ? "" : "it does not fit in shared memory";
}

Plan lay_out(const Problem& p, const DeviceInfo& device, const Tile& tile) {
  Plan plan{.block_q = tile.block_q, .block_kv = tile.block_kv};
  const abi::ForwardConfig config = config_of(p, tile);
  const long long places = abi::transposed_places(p.packed, p.batch, p.seq_kv, p.total_kv, tile.block_kv);
  reserve(plan, abi::ForwardSm90Fp8Region::transposed_V, places * p.head_dim_v * p.heads_kv * (p.packed ? 1 : p.batch));
  plan.maps = forward_sm90_fp8_maps(p, plan);

  constexpr std::int64_t transposed_keys = abi::forward_sm90_fp8_transposed_keys;
  const std::int64_t blocks_kv = (p.seq_kv + tile.block_kv - 1) / tile.block_kv * tile.block_kv;
  add_launch(plan,
             {.unit = "forward/sm90_fp8",
              .entry = "forward_sm90_fp8_transpose",
              .config = launch_config(config),
              .block = 256,
              .shared_bytes = abi::forward_sm90_fp8_transpose_bytes},
             (blocks_kv + transposed_keys - 1) / transposed_keys * p.heads_kv * p.batch);
  const std::int64_t row_tiles = (p.seq_q + tile.block_q - 1) / tile.block_q;
  const std::int64_t units = (config.pair_tiles ? (row_tiles + 1) / 2 : row_tiles) * p.heads_q * p.batch;
  add_launch(plan,
             {.unit = "forward/sm90_fp8",
              .entry = "forward_sm90_fp8_kernel",
              .config = launch_config(config),
              .block = config.num_warps * 32,
              .shared_bytes = abi::forward_sm90_fp8_layout(config).shared_bytes},
             std::min<std::int64_t>(units, device.num_sms));
  return plan;
}

Answer plan_fp8(const Request& r) {
  std::string reason = reject(r);
  if (!reason.empty()) return Refusal{std::move(reason)};
  if (!r.tile) return Offer{lay_out(r.problem, r.device, choose_tile(r))};
  reason = reject_tile(r.problem, r.device, *r.tile);
  if (!reason.empty()) return refuse_tile(*r.tile, reason);
  return Offer{lay_out(r.problem, r.device, Tile{r.tile->block_q, r.tile->block_kv})};
}

/// The map of V^T, which the first launch writes: [places, dim, heads, batch] in boxes of a chunk of places and all
/// columns.
MapLayout transposed_map(int slot, const Problem& p, const Plan& plan) {
  const std::int64_t places = abi::transposed_places(p.packed, p.batch, p.seq_kv, p.total_kv, plan.block_kv);
  const auto chunk = static_cast<std::uint32_t>(abi::forward_sm90_fp8_v_chunk(plan.block_kv));
  MapLayout map{.slot = slot,
                .source = MapSource::workspace,
                .offset = offset_of(plan, abi::ForwardSm90Fp8Region::transposed_V),
                .dtype = *p.kv_dtype,
                .rank = 4};
  const std::int64_t sizes[4] = {places, p.head_dim_v, p.heads_kv, p.packed ? 1 : p.batch};
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
  return {rows_map(map_Q, queries, map_warpgroup_rows),
          rows_map(map_K, key_rows(p, k, p.k_strides, p.head_dim), plan.block_kv), transposed_map(map_V, p, plan),
          rows_map(map_O, query_rows(p, out, p.out_strides, p.head_dim_v), map_warpgroup_rows)};
}

std::span<const KernelEntry> sm90_fp8_kernels() {
  static const std::array<KernelEntry, 1> rows{KernelEntry{
      .name = "forward/sm90_fp8",
      .pass = Pass::forward,
      .device = DeviceKind::cuda,
      .requirements = "sm_90; q, k and v of float8_e4m3 or float8_e5m2, out of float16 or bfloat16; strides that "
                      "TMA can take; causal, windows, softcap, ALiBi, sinks, packed, lengths",
      .takes = {.narrow_keys = true, .narrow_queries = true, .tile = true},
      .proven = run_on_h200,
      .plan = plan_fp8}};
  return rows;
}

}  // namespace flash_attention::plan
