// forward/sm90 and backward/sm90 over lists of blocks of keys. A launch makes a map of tiles of them and a bit for each list and block
// (kernels/mask/list_map.cuh). If a list is of few queries, the heads that share its keys are rows of a tile beside each
// other, so that a tile has few lists, and loads few blocks that only some of its rows name.
#include <algorithm>
#include <bit>

#include "abi/forward_sm90.h"
#include "abi/tile_map.h"
#include "abi/tensor_maps.h"
#include "plan/families/backward_sm90/structure.h"
#include "plan/families/forward_sm90/tile.h"
#include "plan/families/mma.h"
#include "plan/families/portable.h"
#include "plan/families/sm90.h"
#include "plan/kernel_config.h"
#include "plan/key_list.h"
#include "plan/tensor_maps.h"
#include "plan/workspace.h"

namespace flash_attention::plan {
namespace {

constexpr std::int64_t warpgroup_rows = 64;

/// Rows of a query: of the heads that share its keys, filled up to a power of two. 1 if a list is of so many queries that a
/// tile of one head has one list, or if each query head has a list.
std::int64_t stacked_rows(const Problem& p) {
  const std::int64_t heads = stacked_heads(p);
  if (p.key_list.block_q >= warpgroup_rows) return 1;
  return static_cast<std::int64_t>(std::bit_ceil(static_cast<std::uint64_t>(heads)));
}

/// Keys of a bit, and of a block of the kernel: a row sees all of them or none, as far as the lists say.
int keys_of_bit(const Problem& p) {
  return p.key_list.block_kv % 128 == 0 && std::max(p.head_dim, p.head_dim_v) <= 128 ? 128 : 64;
}

std::int64_t list_bit_bytes(const Problem& p) {
  return p.batch * p.key_list.heads * list_rows(p) * abi::list_words(p.seq_kv, keys_of_bit(p)) * 4;
}

std::string reject_lists(const Request& r) {
  const Problem& p = r.problem;
  const abi::Features& f = r.features;
  if (!f.key_set) return "takes lists of blocks of keys, not of keys";
  if (p.packed || p.page_size != 0) return "takes no lists of packed sequences, and none over pages";
  if (p.key_list.block_kv % abi::mask_unit != 0) return "takes lists of blocks of a multiple of 64 keys";
  if (count_score_options(f) > int{f.softcap} || f.has_mask_data() || f.has_statistics() || f.left_padding || p.invariant)
    return "takes no score option beside lists of blocks but a soft cap, no other mask, statistics, left padding or "
           "invariant bits";
  if (std::max(p.head_dim, p.head_dim_v) > 256) return "takes lists of blocks with head dimensions up to 256";
  if (p.total_q * stacked_rows(p) >= std::int64_t{1} << 30) return "takes lists of blocks for at most 2^30 rows";
  if (stacked_rows(p) > warpgroup_rows) return "takes lists of blocks for at most 64 heads that share keys";
  const std::int64_t map_bytes = p.batch * p.key_list.heads * (p.seq_q * stacked_rows(p) / warpgroup_rows + 1) *
                                 abi::map_words(p.seq_kv) * static_cast<std::int64_t>(sizeof(abi::TileWords));
  const std::int64_t query_bytes = p.batch * p.seq_q * p.heads_q * p.head_dim * static_cast<std::int64_t>(size_of(p.dtype));
  if (list_bit_bytes(p) + map_bytes > std::max<std::int64_t>(query_bytes, 1 << 20))
    return "takes lists of blocks whose bits are no larger than q";
  return {};
}

/// The request as the kernels see it: bits of lists, a mask like others. With `problem`: r's, or that of with_stacks.
Request with_list_bits(const Request& r, const Problem& problem) {
  Request bits{problem, r.device, r.features, r.program};
  bits.features.key_list = bits.features.key_set = false;
  bits.features.list_bits = keys_of_bit(r.problem);
  bits.features.list_of_query = r.problem.key_list.block_q == 1;
  bits.features.stacked_heads = stacked_rows(r.problem) > 1 ? static_cast<int>(stacked_rows(r.problem)) : 0;
  return bits;
}

/// The problem whose queries are the rows of stacks, and whose heads are the stacks: what is in the workspace, and tasks,
/// are counted so.
Problem with_stacks(const Problem& p) {
  Problem stacked = p;
  if (const std::int64_t rows = stacked_rows(p); rows > 1)
    stacked.seq_q *= rows, stacked.total_q *= rows, stacked.heads_q = p.heads_kv;
  return stacked;
}

/// The map of q, out or dout, if heads are stacked.
void stack_map(const Problem& p, MapLayout& map) {
  using enum MapSource;
  const auto stacked = static_cast<int>(stacked_rows(p));
  if (stacked == 1) return;
  if (map.source == q)
    map = stacked_rows_map(map.slot, query_rows(p, q, p.q_strides, p.head_dim), p.heads_kv, map_warpgroup_rows, stacked);
  if (map.source == out)
    map = stacked_rows_map(map.slot, query_rows(p, out, p.out_strides, p.head_dim_v), p.heads_kv, map_warpgroup_rows, stacked);
  if (map.source == dout)
    map = stacked_rows_map(map.slot, query_rows(p, dout, p.dout_strides, p.head_dim_v), p.heads_kv, map_warpgroup_rows, stacked);
}

/// 64 rows of a tile have one list, and the next 64 another one.
bool rows_share_no_lists(const Problem& p) {
  const std::int64_t rows = p.key_list.block_q * stacked_rows(p);
  return rows % warpgroup_rows == 0 && rows % (2 * warpgroup_rows) != 0;
}

/// A warpgroup by itself, two to an SM, where neighbouring warpgroups would wait for blocks that only the other one sees.
TileSize choose_list_tile(const Request& bits) {
  const TileSize alone{64, bits.features.list_bits};
  if (rows_share_no_lists(bits.problem) && asked_config(bits, alone).num_stages >= 2) return alone;
  return {128, bits.features.list_bits};
}

Plan lay_out_lists(const Request& bits, const TileSize& tile) {
  const Problem& p = bits.problem;
  const int stacked = std::max(bits.features.stacked_heads, 1);
  Plan plan{.block_q = tile.block_q, .block_kv = tile.block_kv};
  plan.maps = forward_sm90_maps(p, tile.block_q, tile.block_kv);
  for (MapLayout& map : plan.maps) stack_map(p, map);
  // Lists are about as long as each other: blocks take row tiles in turn.
  abi::ForwardConfig config = asked_config(bits, tile);
  config.loop = choose_loop(config);
  reserve(plan, abi::SharedRegion::list_bits, list_bit_bytes(p));
  const std::int64_t heads = stacked > 1 ? p.heads_kv : p.heads_q;
  const std::int64_t units = (p.seq_q * stacked + tile.block_q - 1) / tile.block_q * heads * p.batch;
  const int blocks_per_sm = abi::forward_sm90_blocks_per_sm(config);
  add_launch(plan,
             {.unit = "forward/sm90",
              .entry = "forward_sm90_kernel",
              .config = launch_config(config),
              .block = config.num_warps * 32,
              .shared_bytes = abi::forward_sm90_layout(config).shared_bytes,
              .min_blocks_per_sm = blocks_per_sm,
              .programmatic_launch = true},
             std::min<std::int64_t>(units, std::max(blocks_per_sm * bits.device.num_sms, 1)));
  return plan;
}

}  // namespace

Answer plan_sm90_lists(const Request& r) {
  if (std::string reason = reject_lists(r); !reason.empty()) return Refusal{std::move(reason)};
  const Request bits = with_list_bits(r, r.problem);
  if (r.num_stages > 0 || r.num_splits > 0) return Refusal{"has one way to take lists of blocks"};
  TileSize tile = choose_list_tile(bits);
  if (r.tile) {
    const bool rows = r.tile->block_q == 64 || r.tile->block_q == 128;
    if (!rows || r.tile->block_kv != tile.block_kv || asked_config(bits, *r.tile).num_stages < 2)
      return refuse_tile(*r.tile, "over these lists it has 64 or 128 rows and " + std::to_string(tile.block_kv) + " keys");
    tile = *r.tile;
  }
  return Offer{lay_out_lists(bits, tile)};
}

Answer plan_sm90_backward_lists(const Request& r) {
  if (std::string reason = reject_lists(r); !reason.empty()) return Refusal{std::move(reason)};
  if (std::max(r.problem.head_dim, r.problem.head_dim_v) > 128) return Refusal{"takes lists of blocks with heads up to 128"};
  if (r.features.sink) return Refusal{"takes no sink beside lists of blocks"};
  if (r.tile || r.part || r.num_stages > 0) return Refusal{"has one way to take lists of blocks"};
  const Problem stacked = with_stacks(r.problem);
  const Request bits = with_list_bits(r, stacked);
  const BackwardSm90Structure structure = choose_backward_sm90_structure(bits, true);
  if (structure.dq_mode != abi::DqMode::atomic)
    return Refusal{"adds dQ of lists of blocks in any order: every run has other bits"};
  Plan plan = lay_out_sm90_backward(bits, true, structure);
  for (MapLayout& map : plan.maps) stack_map(r.problem, map);
  reserve(plan, abi::SharedRegion::list_bits, list_bit_bytes(r.problem));
  return Offer{std::move(plan)};
}

}  // namespace flash_attention::plan
