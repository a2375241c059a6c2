#include "abi/mla.h"

#include <algorithm>
#include <array>
#include <limits>

#include "abi/decode.h"
#include "abi/tensor_maps.h"
#include "plan/families/decode/items.h"
#include "plan/families/portable.h"
#include "plan/families/sm90.h"
#include "plan/kernel_config.h"
#include "plan/kernel_table.h"
#include "plan/key_list.h"
#include "plan/tensor_maps.h"
#include "plan/workspace.h"

namespace flash_attention::plan {
namespace {

/// Whether TMA loads blocks of 64 keys: elements have 16 bits, and no block crosses the end of a page.
bool takes_boxes(const Request& r) {
  const Problem& problem = r.problem;
  const bool options =  // that need registers
      r.features.softcap || r.features.alibi || r.features.bias || r.features.mask;
  return !options && !r.features.key_list && !has_no_key_rows(problem) && *problem.kv_dtype == problem.dtype &&
         problem.page_size % abi::mla_block_kv == 0 && reject_tma_cache(problem).empty();
}

/// The number of row tiles of a key head, if all sequences have the same number. Blocks with the same keys then work
/// side by side, and keys are read from memory once. With more row tiles, each would have too few blocks.
std::int64_t rows_side_by_side(const Request& r) {
  const Problem& problem = r.problem;
  if (r.features.key_list) return 1;  // tiles of rows read different keys
  const std::int64_t most = std::min(16, r.device.num_sms);
  const std::int64_t tiles = (decode_rows(problem) + abi::mla_block_q - 1) / abi::mla_block_q;
  return problem.packed || problem.seqused_q || tiles > most ? 1 : std::max<std::int64_t>(tiles, 1);
}

/// Thread blocks of a tile of rows: as many as there are SMs, or a few less, so that each has whole items if all are of
/// equal length. If blocks share an item, each pays about two KV blocks: for Q, the first copies, a part, and the
/// merge.
std::int64_t blocks_of_rows(const Request& r) {
  const Problem& problem = r.problem;
  const std::int64_t most = std::min(r.device.num_sms, abi::decode_max_blocks(r.features)) / rows_side_by_side(r);
  const std::int64_t group = problem.heads_q / problem.heads_kv;
  const std::int64_t of_list = problem.seq_q * ((group + abi::mla_block_q - 1) / abi::mla_block_q);  // tiles of rows
  const std::int64_t items = problem.batch * problem.heads_kv * (r.features.key_list ? of_list : 1);
  if (most == 0 || items == 0) return most;
  const std::int64_t each = (items + most - 1) / most, whole = (items + each - 1) / each;
  return 100 * whole >= 95 * most ? whole : most;
}

/// One block an SM: the stages fill shared memory.
abi::ForwardConfig configure(const Request& r) {
  const Problem& problem = r.problem;
  return {.features = r.features,
          .head_dim = static_cast<int>(problem.head_dim),
          .head_dim_v = abi::mla_head_dim_v,
          .block_q = abi::mla_block_q,
          .block_kv = abi::mla_block_kv,
          .num_warps = 8,
          .num_stages = abi::mla_stages,
          .group = static_cast<int>(problem.heads_q / problem.heads_kv),
          .producer_warp = takes_boxes(r),
          .row_grid = rows_side_by_side(r) > 1};
}

std::string reject(const Request& r) {
  const Problem& problem = r.problem;
  const DeviceInfo& device = r.device;
  if (!problem.latent) return "takes latent keys alone";
  if (device.arch != 90) return "wgmma needs sm_90; this is sm_" + std::to_string(device.arch);
  if (device.shared_bytes < abi::mla_shared_bytes) return "needs more shared memory";
  if (problem.dtype == Dtype::float32) return "wgmma takes float16 and bfloat16, not float32";
  if (problem.head_dim > abi::mla_columns || problem.head_dim_v != abi::mla_head_dim_v) {
    return "needs a head_dim_v of 512 and a head_dim of 512 to 576";
  }
  if (r.features.dropout) return "takes no dropout";
  if (r.features.key_list) {
    const bool hides = r.features.has_window() || r.features.mask || r.features.left_padding;
    if (r.features.key_set) return "takes lists of keys, and none of blocks";
    if (hides || r.features.modifies_scores()) return "with lists takes no window, mask or padding, and plain scores";
    if (r.features.packed) return "with lists takes no packed sequences";
  }
  if (r.features.token_scales) return "takes no scales of rows";
  if (*problem.scale <= 0) return "needs a positive scale";
  for (const Strides& strides : {problem.q_strides, problem.k_strides, problem.v_strides, problem.out_strides}) {
    if (strides.batch % 8 != 0 || strides.seq % 8 != 0 || strides.head % 8 != 0) {
      return "needs strides that are multiples of 8";
    }
  }
  const int of_keys = *problem.kv_dtype != problem.dtype ? 16 : 8;
  if (problem.head_dim % of_keys != 0) return "needs 8-bit rows of a head_dim that is a multiple of 16";
  for (const Strides& strides : {problem.k_strides, problem.v_strides}) {
    if (strides.batch % of_keys != 0 || strides.seq % of_keys != 0 || strides.head % of_keys != 0) {
      return "needs strides of 8-bit rows that are multiples of 16";
    }
  }
  return {};
}

std::vector<MapLayout> maps_of(const Problem& p) {
  using namespace abi::mla_maps;
  const MapRows values = key_rows(p, MapSource::v, p.v_strides, p.head_dim_v);
  std::vector<MapLayout> maps{chunks_map(map_values, values, abi::mla_block_kv, abi::mla_panels_of_part)};
  const std::int64_t own = p.head_dim - p.head_dim_v;
  if (own > 0) maps.push_back(rows_map(map_own, key_rows(p, MapSource::k, p.k_strides, own), abi::mla_block_kv));
  return maps;
}

Plan lay_out(const Request& r, const abi::ForwardConfig& config) {
  Plan plan{.block_q = config.block_q, .block_kv = config.block_kv};
  if (config.producer_warp) plan.maps = maps_of(r.problem);
  const std::int64_t blocks = reserve_decode_parts(r.problem, config, blocks_of_rows(r) * rows_side_by_side(r), plan);
  add_launch(plan,
             {.unit = "decode/mla_sm90",
              .entry = "decode_mla_sm90",
              .config = launch_config(config),
              .block = abi::mla_threads,
              .shared_bytes = abi::mla_shared_bytes},
             blocks);
  if (config.row_grid && blocks > 0) {
    const auto rows = static_cast<int>(rows_side_by_side(r));
    plan.launches.back().grid = {static_cast<int>(blocks) / rows, rows, 1};
  }
  return plan;
}

Answer plan_mla(const Request& r) {
  std::string reason = reject(r);
  if (!reason.empty()) return Refusal{std::move(reason)};
  const abi::ForwardConfig config = configure(r);
  if (decode_tiles(r.problem, config) > std::numeric_limits<int>::max()) return Refusal{"more than 2^31 tiles"};
  return Offer{lay_out(r, config)};
}

// backward/mla_sm90

constexpr std::int64_t list_rows_of_block = 64;  // a block's rows, which share a list

std::int64_t stack_blocks(const Problem& p) {
  const std::int64_t chunks = (p.key_list.block_q * stacked_heads(p) + list_rows_of_block - 1) / list_rows_of_block;
  return p.batch * list_rows(p) * list_units(p) * chunks;
}

std::int64_t key_blocks(const Problem& p) {
  return (p.batch * p.heads_kv * p.seq_kv + list_rows_of_block - 1) / list_rows_of_block;
}

std::string reject_backward(const Request& r) {
  const Problem& problem = r.problem;
  if (!r.features.key_list || r.features.key_set) return "takes lists of keys alone";
  if (r.device.arch != 90) return "wgmma needs sm_90; this is sm_" + std::to_string(r.device.arch);
  if (r.device.shared_bytes < abi::mla_backward_shared_bytes) return "needs more shared memory";
  if (problem.dtype == Dtype::float32) return "wgmma takes float16 and bfloat16, not float32";
  if (problem.head_dim > abi::mla_columns || problem.head_dim < abi::mla_head_dim_v ||
      problem.head_dim_v != abi::mla_head_dim_v) {
    return "needs a head_dim_v of 512 and a head_dim of 512 to 576";
  }
  if (problem.deterministic) return "adds dK and dV of many queries in any order";
  const bool hides = r.features.has_window() || r.features.mask || r.features.left_padding || r.features.key_lengths;
  if (hides || r.features.modifies_scores() || r.features.dropout) {
    return "takes no window, mask, padding or dropout, and plain scores";
  }
  if (r.features.packed || r.features.seqused_q) return "takes no packed sequences, and no lengths of queries";
  if (*problem.scale <= 0) return "needs a positive scale";
  for (const Strides& strides : {problem.q_strides, problem.k_strides, problem.v_strides, problem.dout_strides,
                                 problem.dq_strides, problem.dk_strides, problem.dv_strides}) {
    if (strides.batch % 8 != 0 || strides.seq % 8 != 0 || strides.head % 8 != 0) {
      return "needs strides that are multiples of 8";
    }
  }
  const bool large = std::max(stack_blocks(problem), key_blocks(problem)) > std::numeric_limits<int>::max();
  return large ? "more than 2^31 tiles" : "";
}

Plan lay_out_backward(const Request& r) {
  const Problem& p = r.problem;
  Plan plan{.block_q = static_cast<int>(list_rows_of_block), .block_kv = static_cast<int>(list_rows_of_block)};
  abi::BackwardConfig config = portable_backward_config(p);
  config.features = r.features;
  config.dbias = false;
  const std::int64_t keys = p.batch * p.heads_kv * p.seq_kv;
  reserve_row_delta(p, plan);
  reserve(plan, abi::BackwardMlaRegion::dK, keys * p.head_dim * 4);
  reserve(plan, abi::BackwardMlaRegion::dV, keys * p.head_dim_v * 4);
  const auto add = [&](const char* entry, std::int64_t blocks, int threads, int shared_bytes) {
    add_launch(plan,
               {.unit = "backward/mla_sm90",
                .entry = entry,
                .config = launch_config(config),
                .block = threads,
                .shared_bytes = shared_bytes},
               blocks);
  };
  add("backward_mla_clear", key_blocks(p), 256, 0);
  add_delta_launch(p, plan);
  add("backward_mla_sm90", stack_blocks(p), abi::mla_threads, abi::mla_backward_shared_bytes);
  add("backward_mla_finish", key_blocks(p), 256, 0);
  add_program_and_sink_launches(p, plan);
  return plan;
}

Answer plan_mla_backward(const Request& r) {
  return offer_unless(reject_backward(r), [&] { return lay_out_backward(r); });
}

}  // namespace

std::span<const KernelEntry> mla_kernels() {
  static const std::array<KernelEntry, 2> rows{KernelEntry{
      .name = "decode/mla_sm90",
      .pass = Pass::forward,
      .device = DeviceKind::cuda,
      .requirements = "sm_90; float16 or bfloat16; latent keys, head_dim 512 to 576 and head_dim_v 512; strides that are "
                      "multiples of 8; no dropout",
      .takes = {.pages = true,
                .left_padding = true,
                .narrow_keys = true,
                .latent = true,
                .key_list = true,
                .bit_mask = true,
                .sequence_windows = true},
      .proven = run_on_h200,
      .plan = plan_mla},
      KernelEntry{.name = "backward/mla_sm90",
                  .pass = Pass::backward,
                  .device = DeviceKind::cuda,
                  .requirements = "sm_90; float16 or bfloat16; lists of keys, head_dim 512 to 576 and head_dim_v 512; strides "
                                  "that are multiples of 8; sums in no fixed order",
                  .takes = {.key_list = true},
                  .proven = run_on_h200,
                  .plan = plan_mla_backward}};
  return rows;
}

}  // namespace flash_attention::plan
