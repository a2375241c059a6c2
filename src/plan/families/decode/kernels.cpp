#include <algorithm>
#include <array>
#include <limits>
#include <optional>

#include "abi/decode.h"
#include "abi/tensor_maps.h"
#include "plan/families/decode/blocks.h"
#include "plan/families/decode/items.h"
#include "plan/families/decode/tile.h"
#include "plan/families/portable.h"
#include "plan/families/sm90.h"
#include "plan/features.h"
#include "plan/kernel_config.h"
#include "plan/kernel_table.h"
#include "plan/tensor_maps.h"
#include "support/ceil_div.h"

namespace flash_attention::plan {
namespace {

constexpr std::int64_t max_queries = max_decode_queries;

/// K and V in 4 bits: rows of codes and of scales move in wide accesses.
std::string reject_groups(const Request& r) {
  const Problem& problem = r.problem;
  const auto multiples = [](const Strides& s, std::int64_t of) {
    return s.batch % of == 0 && s.seq % of == 0 && s.head % of == 0;
  };
  if (problem.head_dim % 64 != 0 || problem.head_dim_v % 64 != 0 || std::max(problem.head_dim, problem.head_dim_v) > 256)
    return "with 4-bit keys needs head dimensions of 64, 128, 192 or 256";
  // A row that 0 * NaN has reached would have to be computed again. Where all rows see the same keys, none is reached:
  // other keys are not read.
  const abi::Features& f = r.features;
  const bool by_data =
      f.mask || f.score_hides || f.has_mask_data() || f.precomputed_mask_bits || f.key_list || f.bit_mask();
  if (by_data || (f.has_window() && problem.seq_q > 1))
    return "with 4-bit keys takes no mask, and windows and causal masks of one query of a sequence";
  if (!multiples(problem.k_strides, 16) || !multiples(problem.v_strides, 16))
    return "needs 4-bit rows whose strides are multiples of 16 bytes";
  for (const Strides& s : {problem.k_strides, problem.v_strides, problem.k_group_strides, problem.v_group_strides}) {
    if (std::min(s.seq, s.head) < 0 || std::max(s.seq, s.head) > std::numeric_limits<std::int32_t>::max())
      return "with 4-bit keys needs strides of rows and heads from 0 to 2^31 - 1";
  }
  const auto bytes = static_cast<std::int64_t>(*problem.kv_dtype == Dtype::int4 ? size_of(problem.dtype) : 1);
  for (const bool of_k : {true, false}) {
    const std::int64_t row = (of_k ? problem.head_dim : problem.head_dim_v) / problem.kv_group * bytes;
    const std::int64_t width = std::min<std::int64_t>(row & -row, 16);
    if (!multiples(of_k ? problem.k_group_strides : problem.v_group_strides, width / bytes))
      return "needs rows of scales whose strides are multiples of " + std::to_string(width) + " bytes";
  }
  return {};
}

/// The reason that does not depend on sizes.
std::string reject_kind(const Request& r) {
  const Problem& problem = r.problem;
  if (r.device.arch < 80) return "needs sm_80";
  if (problem.dtype == Dtype::float32) return "needs a 16-bit dtype";
  if (r.features.dropout) return "takes no dropout";
  if (problem.head_dim % 8 != 0 || problem.head_dim_v % 8 != 0) return "needs head dimensions that are multiples of 8";
  if (!problem.latent && std::max(problem.head_dim, problem.head_dim_v) > 512) return "needs head dimensions up to 512";
  if (problem.invariant && (problem.latent || std::max(problem.head_dim, problem.head_dim_v) > 256))
    return "takes no latent keys and no heads wider than 256 where bits are invariant";
  if (problem.latent && *problem.kv_dtype != problem.dtype) return "takes no latent keys of 8 bits";
  if (*problem.scale <= 0) return "needs a positive scale";
  if (r.features.key_list) {
    if (r.features.bias || r.features.alibi || r.features.mask) return "with lists takes no bias, slopes or mask";
    const KeyList& list = problem.key_list;
    if (list.block_q != 1) return "takes lists of single queries";
    if (list.heads != 1 && list.heads != problem.heads_kv) return "takes a list for all heads, or one for each key head";
    if (list.entries > std::numeric_limits<int>::max() / 2 / list.block_kv) return "2^30 keys in a list, or more";
  }
  const auto multiples = [](const Strides& s, int of) { return s.batch % of == 0 && s.seq % of == 0 && s.head % of == 0; };
  for (const Strides& strides : {problem.q_strides, problem.k_strides, problem.v_strides, problem.out_strides}) {
    if (!multiples(strides, 8)) return "needs strides that are multiples of 8";
  }
  if (problem.kv_group != 0) return reject_groups(r);
  if (*problem.kv_dtype != problem.dtype) {
    if (!multiples(problem.k_strides, 16) || !multiples(problem.v_strides, 16) || problem.head_dim % 16 != 0 ||
        problem.head_dim_v % 16 != 0) {
      return "needs 8-bit rows whose strides and head_dim are multiples of 16";
    }
  }
  return {};
}

/// With full tiles, one for each SM, kernels for many queries are five times as fast (H200: about 780 TFLOP/s, 140 here).
/// If fewer than a fifth of those rows are in use, this kernel is faster, because it splits keys. Measured at 32 heads over
/// 16384 keys: 128 queries 167 us there and 240 here, 64 queries 178 and 142.
std::string prefers_prefill(const Request& r) {
  const Problem& problem = r.problem;
  constexpr std::int64_t tile_rows = 128, faster = 5;
  if (r.features.key_list) {
    if (!r.features.key_set || problem.seq_q <= max_queries) return "";
    return "more than " + std::to_string(max_queries) +
           " queries of a sequence: neighbours share the blocks of their lists";
  }
  const std::int64_t mean = problem.packed ? problem.total_q / std::max<std::int64_t>(1, problem.batch) : problem.seq_q;
  const std::int64_t row_tiles = ceil_div(std::max<std::int64_t>(mean, 1), tile_rows);
  const std::int64_t at_once = std::min<std::int64_t>(row_tiles * problem.heads_q * problem.batch, r.device.num_sms);
  if (mean <= max_queries || faster * at_once * mean < r.device.num_sms * row_tiles * tile_rows) return "";
  return "more than " + std::to_string(max_queries) + " queries of a sequence: a tile of rows for each head is faster";
}

/// Whether pages hold whole boxes: of a tile, or of as many rows as a page has. Boxes begin where the swizzle does.
bool pages_are_boxes(const Problem& problem, int block_kv) {
  const std::int64_t size = problem.page_size;
  return size % block_kv == 0 || (block_kv % size == 0 && size % 8 == 0) || problem.seq_kv <= size;
}

/// Which problems of decode/sm80 decode/sm90 refuses. Both have the same tiles, so results have the same bits;
/// decode/sm90 loads them by TMA.
std::string reject_tma(const Problem& problem, const abi::ForwardConfig& config) {
  if (config.block_q > 16 && is_narrow(key_type(config.features))) return "takes at most 16 rows of 8-bit keys at a time";
  if (config.num_warps % 4 != 0) return "needs whole warpgroups";
  if (problem.kv_scales == ScaleKind::token) return "takes no scales of tokens";
  if (problem.page_size != 0 && !pages_are_boxes(problem, config.block_kv)) {
    return "takes pages of 8, 16, 32, 64 and multiples of " + std::to_string(config.block_kv) + " keys";
  }
  if (has_no_key_rows(problem) || problem.seq_kv == 0) return "there is nothing to load";
  return reject_tma_cache(problem);
}

/// The map of K or V: rows of sequences, or of pages. Elements of 8 bits are counted in pairs.
MapLayout cache_map(int slot, const Problem& p, MapSource source, const Strides& strides, std::int64_t dim, int block_kv) {
  const auto element = static_cast<std::int64_t>(size_of(*p.kv_dtype)), pair = static_cast<std::int64_t>(size_of(p.dtype));
  const auto in_pairs = [&](std::int64_t elements) { return elements * element / pair; };
  const Strides stored{in_pairs(strides.batch), in_pairs(strides.seq), in_pairs(strides.head)};
  MapRows rows = key_rows(p, source, stored, in_pairs(dim));
  rows.dtype = p.dtype;
  const std::int64_t box = p.page_size != 0 ? std::min<std::int64_t>(p.page_size, block_kv) : block_kv;
  return rows_map(slot, rows, static_cast<int>(box));
}

std::vector<MapLayout> maps_of(const Problem& p, int block_kv) {
  using namespace abi::decode_sm90_maps;
  return {cache_map(decode_map_K, p, MapSource::k, p.k_strides, p.head_dim, block_kv),
          cache_map(decode_map_V, p, MapSource::v, p.v_strides, p.head_dim_v, block_kv)};
}

Plan lay_out(const Problem& problem, const DeviceInfo& device, abi::ForwardConfig config) {
  const bool producer_warp = config.producer_warp;
  Plan plan{.block_q = config.block_q, .block_kv = config.block_kv};
  if (producer_warp) plan.maps = maps_of(problem, config.block_kv);
  const std::int64_t blocks = share_decode_items(problem, device, config, plan);
  add_launch(plan,
             {.unit = producer_warp ? "decode/sm90" : "decode/sm80",
              .entry = producer_warp ? "decode_sm90" : "decode_sm80",
              .config = launch_config(config),
              .block = abi::decode_threads(config),
              .cluster = abi::decode_has_clusters(config) ? config.item_blocks : 1,
              .shared_bytes = abi::DecodeLayout(config).shared_bytes,
              .min_blocks_per_sm =
                  producer_warp || problem.kv_group != 0 ? abi::decode_blocks_per_sm(config, device.shared_bytes) : 1},
             blocks);
  const std::int64_t heads = problem.heads_kv;
  if (config.head_grid) plan.launches.back().grid = {static_cast<int>(blocks / heads), static_cast<int>(heads), 1};
  if (config.item_blocks > 0) {
    const std::int64_t of_head = blocks / (heads * problem.batch);
    plan.launches.back().grid = {static_cast<int>(of_head), static_cast<int>(heads), static_cast<int>(problem.batch)};
  }
  return plan;
}

Answer plan_decode(const Request& r, bool by_tma) {
  const Problem& problem = r.problem;
  if (by_tma && r.device.arch != 90) return Refusal{"TMA needs sm_90; this is sm_" + std::to_string(r.device.arch)};
  if (std::string reason = reject_kind(r); !reason.empty()) return Refusal{std::move(reason)};
  if (r.num_stages == 1) return Refusal{"needs two stages"};
  if ((r.tile || r.num_stages > 0) && (problem.invariant || *problem.kv_dtype != problem.dtype))
    return Refusal{"has one tile where bits are invariant or those of 16-bit keys"};
  const std::optional<abi::ForwardConfig> config = choose_decode_tile(r, by_tma);
  if (!config && r.tile)
    return refuse_tile(*r.tile, "its rows are 8 to 64, as many as there are, and its keys 32, 64 or 128");
  if (!config) return Refusal{"needs more shared memory"};
  if (problem.seq_q > max_queries && problem.page_size == 0 && !problem.invariant && !problem.latent &&
      !r.features.key_list) {
    return Refusal{"takes at most " + std::to_string(max_queries) + " queries of a sequence where there are no pages"};
  }
  if (decode_tiles(problem, *config) > std::numeric_limits<int>::max()) return Refusal{"more than 2^31 tiles"};
  if (by_tma) {
    if (std::string reason = reject_tma(problem, *config); !reason.empty()) return Refusal{std::move(reason)};
  }
  return Offer{lay_out(problem, r.device, *config), prefers_prefill(r)};
}

Answer plan_sm80(const Request& r) { return plan_decode(r, false); }
Answer plan_sm90(const Request& r) { return plan_decode(r, true); }

}  // namespace

std::span<const KernelEntry> decode_kernels() {
  static const std::array<KernelEntry, 2> rows{
      KernelEntry{.name = "decode/sm90",
                  .pass = Pass::forward,
                  .device = DeviceKind::cuda,
                  .requirements =
                      "sm_90; what decode/sm80 takes, with strides that TMA can take, pages of 8, 16, 32, 64 or multiples "
                      "of a tile's keys, at most 16 rows of 8-bit keys at a time, no scales of tokens",
                  .takes = {.pages = true,
                            .left_padding = true,
                            .invariant = true,
                            .narrow_keys = true,
                            .tile = true,
                            .stages = true,
                            .bit_mask = true,
                            .sequence_windows = true},
                  .proven = run_on_h200,
                  .plan = plan_sm90},
      KernelEntry{.name = "decode/sm80",
                  .pass = Pass::forward,
                  .device = DeviceKind::cuda,
                  .requirements =
                      "sm_80; float16 or bfloat16; at most 16 queries of a sequence, any number with pages or "
                      "invariant bits, latent keys or lists of keys; strides that are multiples of 8; no dropout",
                  .takes = {.pages = true,
                            .left_padding = true,
                            .invariant = true,
                            .narrow_keys = true,
                            .grouped_keys = true,
                            .latent = true,
                            .tile = true,
                            .stages = true,
                            .key_list = true,
                            .bit_mask = true,
                            .sequence_windows = true},
                  .proven = run_on_h200,
                  .plan = plan_sm80}};
  return rows;
}

std::optional<FixedOrder> fixed_order(const Request& r) {
  if (!r.problem.invariant || !missing_option(decode_kernels()[1], r).empty() || !reject_kind(r).empty()) return {};
  Request usual = r;  // without the requested tile
  usual.tile.reset();
  const std::optional<abi::ForwardConfig> config = choose_decode_tile(usual, false);
  if (!config) return {};
  return FixedOrder{config->block_kv, config->split_tiles};
}

}  // namespace flash_attention::plan
