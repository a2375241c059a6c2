#include <algorithm>
#include <cmath>

#include "abi/backward_sm90.h"
#include "abi/tensor_maps.h"
#include "plan/families/backward_sm90/structure.h"
#include "plan/families/portable.h"
#include "plan/families/sm90.h"
#include "plan/features.h"
#include "plan/kernel_config.h"
#include "plan/tensor_maps.h"
#include "plan/workspace.h"
#include "support/ceil_div.h"

namespace flash_attention::plan {
namespace {

/// Whether heads are so wide that two warpgroups compute their gradients, half of the columns each:
/// kernels/backward/sm90/columns/kernel.cuh.
bool is_split_by_columns(const Problem& p) { return std::max(p.head_dim, p.head_dim_v) > 256; }

std::string reject_backward(const Request& r) {
  const Problem& p = r.problem;
  std::string reason = reject_sm90(p, r.device);
  if (reason.empty()) reason = reject_tma_strides(p, Pass::backward);
  if (!reason.empty()) return reason;
  if (std::max(p.head_dim, p.head_dim_v) > 512) return "needs head dimensions up to 512";
  if (is_split_by_columns(p) && p.invariant) return "gives no invariant bits with heads wider than 256";
  // Found by random problems, repeated on an H200; the emulator does not show it: docs/lab/masks.md.
  if (std::max(p.head_dim, p.head_dim_v) > 128 && r.features.has_mask_data()) return "takes no masks of heads wider than 128";
  for (const Strides& strides : {p.dq_strides, p.dk_strides, p.dv_strides}) {
    if (strides.batch % 2 != 0 || strides.seq % 2 != 0 || strides.head % 2 != 0) return "gradients need even strides";
  }
  return "";
}

/// Whether the launches around the main loop take only a few microseconds, about as long as SMs take to change the
/// division of their memory. Longer launches have many loads in flight, and need room for them in L1
/// (docs/lab/backward_sm90.md).
bool are_launches_short(const Problem& p, const DeviceInfo& device) {
  // of sums of dQ; as many bytes of O and dO are read
  const std::int64_t row_bytes = 4 * std::max(p.head_dim, p.head_dim_v);
  return 2 * p.total_q * p.heads_q * row_bytes <= device.l2_bytes;
}

/// Whether the tensor cores subtract lse and delta: if scores are plain and sums of dQ are in memory, for the cases
/// that have been timed (docs/lab/backward_sm90.md). All parts of a pass agree, whatever the lengths and the window of
/// a block. A row past the last query has half of the largest float16 or bfloat16 as lse / scale, which must make its
/// probabilities 0.
bool takes_statistics_by_product(const Problem& p, const abi::BackwardConfig& config, bool whole) {
  const bool sums_dq = config.dq_mode == abi::DqMode::atomic || config.dq_mode == abi::DqMode::ordered;
  const bool timed = std::min(p.head_dim, p.head_dim_v) >= 64 && !p.packed && !p.seqused_q && !config.key_sums &&
                     !(whole && config.features.window_left);
  const float least = p.dtype == Dtype::float16 ? 0x1p-6f : 0x1p-30f, scale = std::abs(p.scale.value_or(1.0f));
  return sums_dq && timed && !config.features.touches_scores() && scale >= least && std::isfinite(scale);
}

/// The number of heads whose dQ the main kernel converts: all but the last ones, which are complete at its end. Those are
/// at least the heads that are taken by length at the end (TaskOrder::by_heads). Taken under a causal mask from 4096
/// queries on, with heads of 64 columns up to 8192 (H200, 16384 tokens): 128 columns 1.5 to 2 % faster, 64 columns 1.2 and
/// 0.3 %. With shorter heads the warps that convert fall behind: 128 columns, 2048 queries 11 % slower.
int early_heads_of(const Problem& p, const DeviceInfo& device, const abi::BackwardConfig& config) {
  const abi::Features& f = config.features;
  const bool by_heads = config.dq_mode == abi::DqMode::atomic && !config.key_sums && !config.interleave_heads &&
                        !config.split_first && f.window_right && !f.window_left && !chooses_steps(f) &&
                        f.stacked_heads == 0 && p.heads_q == p.heads_kv;
  const std::int64_t least_rows = 31LL * device.num_sms, most_rows = 2 * least_rows + device.num_sms;
  const bool narrow = std::max(p.head_dim, p.head_dim_v) <= 64;
  if (!by_heads || !config.statistics_by_product || p.seq_q < least_rows || (narrow && p.seq_q > most_rows)) return 0;
  constexpr std::int64_t rows_of_sm = 496, most_by_length = 32;
  std::int64_t late = ceil_div(device.num_sms * rows_of_sm, p.seq_q);
  if (config.block_kv == 2 * tile_rows) late = std::min(late, most_by_length);
  const std::int64_t heads = p.heads_q * p.batch;
  return heads >= 2 * late ? static_cast<int>(heads - late) : 0;
}

std::int64_t padded_rows(const Problem& p) { return sm90_padded_rows(p.total_q, p.batch); }

void reserve_floats(Plan& plan, abi::BackwardSm90Region region, std::int64_t floats) { reserve(plan, region, floats * 4); }

/// Whether keys may be hidden from queries that multiply them: kernels/backward/sm90/repair.cuh.
bool may_need_repair(const abi::Features& f) {
  return f.hides_keys() || f.dropout || f.key_lengths || f.seqused_kv;
}

constexpr int repair_warps = 4;  // each takes a tile of keys

std::int64_t repair_blocks(const Problem& p, const DeviceInfo& device) {
  const std::int64_t blocks = ceil_div(ceil_div(p.seq_kv, tile_rows) * p.heads_kv * p.batch, repair_warps);
  return std::min<std::int64_t>(blocks, 8LL * device.num_sms);
}

/// The configuration of a launch that computes scores. The test for a soft cap depends on neighbouring rows, so
/// invariant bits do without it.
LaunchConfig looped(abi::BackwardConfig config, bool invariant) {
  config.loop = choose_loop(config);
  if (invariant) config.loop.tests_cap = false;
  return launch_config(config);
}

/// Adds the launches of dV, dK and dQ, each with as many stages as fit.
void add_column_launches(const Problem& p, const DeviceInfo& device, abi::BackwardConfig config, Plan& plan) {
  constexpr int cluster = abi::backward_sm90_columns_cluster;
  const auto add = [&](const char* entry, bool has_dP, std::int64_t tasks) {
    config.num_stages = 9;
    while (abi::backward_sm90_columns_shared_bytes(config, has_dP) > abi::backward_sm90_max_shared_bytes)
      --config.num_stages;
    add_launch(plan,
               {.unit = "backward/sm90/columns",
                .entry = entry,
                .config = looped(config, p.invariant),
                .block = 384,
                .cluster = cluster,
                .shared_bytes = abi::backward_sm90_columns_shared_bytes(config, has_dP)},
               std::min<std::int64_t>(tasks, std::max(device.num_sms / cluster, 1)) * cluster);
  };
  const std::int64_t key_tasks = ceil_div(p.seq_kv, cluster * tile_rows) * p.heads_kv * p.batch;
  add("backward_sm90_columns_dv", false, key_tasks);
  add("backward_sm90_columns_dk", true, key_tasks);
  add("backward_sm90_columns_dq", true, ceil_div(p.seq_q, cluster * tile_rows) * p.heads_q * p.batch);
}

/// The configuration of the kernels around the main loop.
LaunchConfig row_config(abi::BackwardConfig config) {
  config.features = row_features(config.features);
  config.num_warps = 4, config.num_stages = 1, config.interleave_heads = false;
  return launch_config(config);
}

}  // namespace

bool has_backward_bias_boxes(const Request& r) {
  const Problem& p = r.problem;
  const bool lengths = p.packed || p.seqused_q;  // biases past the last query may be anything
  return has_bias_boxes(r) && std::max(p.head_dim, p.head_dim_v) <= 64 && !lengths;
}

namespace {

std::vector<MapLayout> maps_of(const Problem& p, bool bias_boxes) {
  using enum MapSource;
  using namespace abi::backward_sm90_maps;
  constexpr int cluster = abi::backward_sm90_columns_cluster;
  const MapRows Q = query_rows(p, q, p.q_strides, p.head_dim), K = key_rows(p, k, p.k_strides, p.head_dim);
  const MapRows V = key_rows(p, v, p.v_strides, p.head_dim_v), dO = query_rows(p, dout, p.dout_strides, p.head_dim_v);
  std::vector<MapLayout> maps;
  maps.reserve(is_split_by_columns(p) ? 8 : 5);
  maps.push_back(rows_map(map_Q, Q, tile_rows));
  maps.push_back(rows_map(map_K, K, tile_rows));
  maps.push_back(rows_map(map_V, V, tile_rows));
  maps.push_back(rows_map(map_dO, dO, tile_rows));
  if (bias_boxes) maps.push_back(bias_map(map_bias, p, tile_rows));
  if (!is_split_by_columns(p)) return maps;
  maps.push_back(wide_map(map_rows_of_Q, Q, cluster));
  maps.push_back(wide_map(map_rows_of_K, K, cluster));
  maps.push_back(wide_map(map_rows_of_dO, dO, cluster));
  return maps;
}

}  // namespace

Plan lay_out_sm90_backward(const Request& r, bool whole, const BackwardSm90Structure& structure) {
  const Problem& p = r.problem;
  const DeviceInfo& device = r.device;
  const abi::Features& f = r.features;
  // Wide kernels go over all tiles: with a map they would have fewer steps than they count tiles.
  abi::BackwardConfig config{.features = structure.wide ? f : with_map(f),
                             .head_dim = static_cast<int>(p.head_dim),
                             .head_dim_v = static_cast<int>(p.head_dim_v),
                             .block_q = tile_rows,
                             .block_kv = structure.warpgroups * tile_rows,
                             .num_warps = structure.wide ? 12 : (structure.warpgroups + 1) * 4,
                             .num_stages = structure.stages,
                             .dq_mode = structure.dq_mode,
                             .bias_boxes = has_backward_bias_boxes(r)};
  const bool separate_dq = config.dq_mode == abi::DqMode::separate_kernel, direct = config.dq_mode == abi::DqMode::direct;
  Plan plan{.block_q = config.block_q, .block_kv = config.block_kv};
  plan.maps = maps_of(p, config.bias_boxes);
  if (whole && !direct && !p.invariant) plan.num_splits = num_gqa_splits(p, device, config);
  config.key_sums = plan.num_splits > 1;
  config.interleave_heads = interleaves_heads(p, device, config);
  config.split_first = whole && splits_first(p, config);
  config.statistics_by_product = !p.invariant && takes_statistics_by_product(p, config, whole);
  config.mask_bits = whole && has_mask_bits(p, config);
  if (whole) plan.early_heads = early_heads_of(p, device, config);
  config.early_dq = plan.early_heads > 0;

  // Kernels of other families compute dbias and dsink. They read delta in the layout of lse.
  const bool portable_parts = f.bias || f.sink || p.program_gradients != 0;
  if (portable_parts) reserve_row_delta(p, plan);
  const std::int64_t rows = padded_rows(p) * p.heads_q;
  using Region = abi::BackwardSm90Region;
  reserve_floats(plan, Region::lse2, rows + rows / tile_rows + 1);  // and the flags of rows that may not be finite
  reserve_floats(plan, Region::delta, rows);
  if (config.statistics_by_product) reserve(plan, Region::parts, rows * abi::backward_sm90_parts_row_bytes);
  reserve_floats(plan, Region::tasks, 2 + (config.early_dq ? p.heads_q * p.batch : 0));
  if (!separate_dq && !direct) reserve_floats(plan, Region::dQ, rows * ((p.head_dim + 31) / 32 * 32));

  const std::int64_t first_keys = config.block_kv * p.heads_kv * p.batch;
  const std::int64_t keys = config.split_first ? first_keys : (p.total_kv + config.block_kv * p.batch) * p.heads_kv;
  const int first_parts = config.split_first ? abi::backward_sm90_first_parts(p.seq_q) : 1;
  if (config.key_sums || first_parts > 1) {
    reserve_floats(plan, Region::dK, keys * ((p.head_dim + 31) / 32 * 32));
    reserve_floats(plan, Region::dV, keys * ((p.head_dim_v + 31) / 32 * 32));
  }

  if (config.dq_mode == abi::DqMode::ordered)
    reserve_floats(plan, Region::order, rows / tile_rows + 1 + (config.key_sums ? keys / 16 + 1 : 0));

  const std::int64_t tiles_of_head = ceil_div(p.seq_q, tile_rows), row_tiles = tiles_of_head * p.heads_q * p.batch;
  const std::int64_t late_tiles = row_tiles - tiles_of_head * plan.early_heads;  // of which a launch converts dQ
  const std::int64_t key_tiles =
      (ceil_div(p.seq_kv, config.block_kv) + first_parts - 1) * p.heads_kv * p.batch * plan.num_splits;
  const LaunchConfig source = looped(config, p.invariant), row_source = row_config(config);
  // the order depends on the mask
  const LaunchConfig& prepare_source = config.dq_mode == abi::DqMode::ordered || config.early_dq ? source : row_source;
  if (!direct) {
    add_launch(plan,
               {.unit = "backward/sm90/prepare", .entry = "backward_sm90_prepare", .config = prepare_source, .block = 128},
               std::max<std::int64_t>(row_tiles, 1));  // it also zeroes the counters
  }
  if (is_split_by_columns(p)) {
    add_column_launches(p, device, config, plan);
  } else if (structure.wide) {
    add_launch(plan,
               {.unit = "backward/sm90/wide",
                .entry = "backward_sm90_wide_kernel",
                .config = source,
                .block = config.num_warps * 32,
                .shared_bytes = abi::backward_sm90_wide_shared_bytes(config)},
               std::min<std::int64_t>(key_tiles, device.num_sms));
  } else {
    const bool three = structure.warpgroups == 3;
    add_launch(plan,
               {.unit = three ? "backward/sm90/three_warpgroups" : "backward/sm90/two_warpgroups",
                .entry = three ? "backward_sm90_three_warpgroups_kernel" : "backward_sm90_two_warpgroups_kernel",
                .config = source,
                .block = config.num_warps * 32,
                .shared_bytes = abi::backward_sm90_shared_bytes(config),
                .programmatic_launch = !direct},
               std::min<std::int64_t>(key_tiles, device.num_sms));
  }
  if (separate_dq && !is_split_by_columns(p)) {
    abi::BackwardConfig dq = config;
    dq.block_kv = tile_rows;
    dq.num_warps = 12;
    dq.num_stages = structure.wide ? 3 : 6;
    dq.bias_boxes = false;
    add_launch(plan,
               {.unit = "backward/sm90/separate_dq",
                .entry = "backward_sm90_separate_dq_kernel",
                .config = looped(dq, p.invariant),
                .block = 384,
                .shared_bytes = abi::backward_sm90_dq_shared_bytes(dq)},
               std::min<std::int64_t>(ceil_div(p.seq_q, 128) * p.heads_q * p.batch, device.num_sms));
  }
  if (config.key_sums) {
    add_launch(plan,
               {.unit = "backward/sm90/prepare", .entry = "backward_sm90_convert_keys", .config = row_source, .block = 128},
               ceil_div(p.seq_kv, tile_rows) * p.heads_kv * p.batch);
  }
  const bool converts = !separate_dq && !direct, repairs = !direct && may_need_repair(f);
  // In parts of a pass, one part converts dQ and another repairs.
  const bool together = converts && repairs && whole;
  if (converts && !together) {
    add_launch(plan,
               {.unit = "backward/sm90/prepare", .entry = "backward_sm90_convert", .config = row_source, .block = 128},
               row_tiles);
  }
  if (repairs) {
    add_launch(plan,
               {.unit = "backward/sm90/repair",
                .entry = together ? "backward_sm90_finish"
                         : whole  ? "backward_sm90_repair"
                                  : "backward_sm90_repair_part",
                .config = source,
                .block = 32 * repair_warps},
               repair_blocks(p, device) + (first_parts > 1 ? first_keys / tile_rows : 0) + (together ? late_tiles : 0));
  }
  for (Launch& launch : plan.launches) launch.prefer_shared_carveout = are_launches_short(p, device);
  if (portable_parts) {
    add_delta_launch(p, plan);
    add_sm80_bias_launch(p, device, plan);
    add_program_and_sink_launches(p, plan);
  }
  return plan;
}

namespace {

/// A structure with the requested tile, or why there is none.
std::string reject_tile(const Request& r, const BackwardSm90Structure& own, const TileSize& asked) {
  const std::int64_t dim = std::max(r.problem.head_dim, r.problem.head_dim_v);
  if (asked.block_q != tile_rows || (asked.block_kv != 2 * tile_rows && asked.block_kv != 3 * tile_rows))
    return "allowed are 64 queries and 128 or 192 keys";
  if (asked.block_kv == own.warpgroups * tile_rows) return "";
  if (own.wide || own.dq_mode == abi::DqMode::direct || dim > 64) return "it has one tile for such heads";
  return asked.block_kv == 2 * tile_rows || has_registers_for_three(r.features) ? "" : "options take the registers of 192 keys";
}

Answer plan_backward(const Request& r) {
  std::string reason = reject_backward(r);
  if (!reason.empty()) return Refusal{std::move(reason)};
  if (r.features.key_list) return plan_sm90_backward_lists(r);
  if (r.part) return plan_sm90_backward_part(r);
  BackwardSm90Structure structure = choose_backward_sm90_structure(r, true);
  if (r.tile) {
    reason = reject_tile(r, structure, *r.tile);
    if (!reason.empty()) return refuse_tile(*r.tile, reason);
    structure.warpgroups = r.tile->block_kv / tile_rows;
  }
  if (r.num_stages > 0) {
    if (r.num_stages == 1 || is_split_by_columns(r.problem)) return Refusal{"has two stages or more, and one way for wide heads"};
    if (structure.warpgroups == 3 && r.num_stages != 3) return Refusal{"192 keys have three stages"};
    structure.stages = r.num_stages;
  }
  Plan plan = lay_out_sm90_backward(r, true, structure);
  for (const Launch& launch : plan.launches) {
    if (launch.shared_bytes > r.device.shared_bytes) return Refusal{"so many stages do not fit"};
  }
  return Offer{std::move(plan)};
}

}  // namespace

KernelEntry sm90_backward_kernel() {
  return {.name = "backward/sm90",
          .pass = Pass::backward,
          .device = DeviceKind::cuda,
          .requirements = "sm_90; float16 or bfloat16; strides that TMA can take; every option",
          .takes = {.hidden_rows = true,
                    .block_mask = true,
                    .programs = true,
                    .tile = true,
                    .stages = true,
                    .parts = true,
                    .key_list = true},
          .proven = run_on_h200,
          .plan = plan_backward};
}

}  // namespace flash_attention::plan
