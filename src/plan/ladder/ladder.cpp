#include "plan/ladder/ladder.h"

#include <algorithm>
#include <array>
#include <limits>
#include <utility>
#include <vector>

#include "plan/families/portable.h"
#include "plan/families/sm90.h"
#include "support/ceil_div.h"

namespace flash_attention::plan {
namespace {

// Shared memory of the rungs, the size of their SharedStorage: bytes of a block that computes with rows of head_dim
// elements.

constexpr int float_bytes = 4, half_bytes = 2;

int row_tile_bytes(const Rung& rung, int dim) {
  const int Q = rung.block_q * dim, K = rung.block_kv * (dim + 4), V = rung.block_kv * dim,
            P = rung.block_q * rung.block_kv;
  return float_bytes * (Q + K + V + P);
}

/// Columns of a tile: whole steps of a product, or whole panels of tile::SwizzledTile.
int wide(int head_dim) { return (head_dim + 15) / 16 * 16; }
int in_panels(int head_dim) { return (head_dim + 63) / 64 * 64; }

/// Two tensors of a block and of a tile, and two weights of each pair, in fp32.
int backward_tile_bytes(const Rung& rung, int dim) {
  return 2 * float_bytes * (rung.block_q * dim + rung.block_kv * (dim + 4) + rung.block_q * rung.block_kv);
}

/// The two tensors of a block and of each stage in tile::SwizzledTile, with two statistics of each query; each stage is
/// rounded up to the tiles' alignment.
int backward_mma_bytes(const Rung& rung, int dim) {
  return 2 * half_bytes * (rung.block_q + rung.num_stages * rung.block_kv) * in_panels(dim) + 1024 * rung.num_stages;
}

/// One kernel on tiles of each kind.
int backward_mixed_bytes(const Rung& rung, int dim) {
  return std::max(backward_tile_bytes(rung, dim), backward_mma_bytes(rung, dim));
}

/// 16-bit Q, K, V and P; S and the product P V in fp32.
int wmma_bytes(const Rung& rung, int head_dim) {
  const int operands = (rung.block_q + 2 * rung.block_kv) * wide(head_dim) + rung.block_q * (rung.block_kv + 8);
  return half_bytes * operands + float_bytes * rung.block_q * (rung.block_kv + 4 + wide(head_dim) + 4);
}

/// The same without S, and with three statistics of a row.
int fragment_bytes(const Rung& rung, int head_dim) {
  return wmma_bytes(rung, head_dim) - float_bytes * rung.block_q * (rung.block_kv + 4) + 3 * float_bytes * rung.block_q;
}

/// Q and stages of K and V, 16 bits.
int plain_bytes(const Rung& rung, int head_dim) {
  return half_bytes * (rung.block_q + 2 * rung.num_stages * rung.block_kv) * wide(head_dim);
}

/// The same in tile::SwizzledTile.
int swizzled_bytes(const Rung& rung, int head_dim) {
  return half_bytes * (rung.block_q + 2 * rung.num_stages * rung.block_kv) * in_panels(head_dim);
}

/// The same with barriers after the tiles, rounded up to the tiles' alignment.
int tma_bytes(const Rung& rung, int head_dim) { return swizzled_bytes(rung, head_dim) + 1024; }

/// The same with a second stage of Q and a buffer for O.
int persistent_bytes(const Rung& rung, int head_dim) {
  return tma_bytes(rung, head_dim) + 2 * half_bytes * rung.block_q * in_panels(head_dim);
}

/// Q, O and stages of K and V^T in 8 bits, O in 16; a row of Q and K, and of V^T, is 128 bytes.
int narrow_bytes(const Rung& rung, int head_dim) {
  const int columns = (head_dim + 31) / 32 * 32;
  const int stage = 128 * (rung.block_kv + columns);
  return rung.block_q * (128 + half_bytes * in_panels(columns)) + rung.num_stages * stage + 1024;
}

// The table -----------------------------------------------------------------------------------------------------------

/// A rung on wgmma: two warpgroups that attend, and from 13_warp_specialised on one that loads.
constexpr Rung wgmma_rung(std::string_view name, int num_warps) {
  return {.name = name,
          .arch = 90,
          .block_q = 128,
          .block_kv = 128,
          .num_warps = num_warps,
          .num_stages = 2,
          .wgmma = true,
          .tma = true,
          .shared_bytes = tma_bytes};
}

constexpr auto table = std::to_array<Rung>({
    {.name = "ladder/00_standard",
     .float32 = true,
     .block_q = 128,
     .block_kv = 128,
     .num_warps = 4,
     .add_launches = add_standard_launches},
    {.name = "ladder/01_naive", .float32 = true, .block_q = 128, .block_kv = 1, .num_warps = 4, .min_blocks_per_sm = 3},
    {.name = "ladder/02_coalesced", .float32 = true, .block_q = 4, .block_kv = 1, .num_warps = 4},
    {.name = "ladder/03_row_tile",
     .float32 = true,
     .block_q = 16,
     .block_kv = 32,
     .num_warps = 4,
     .shared_bytes = row_tile_bytes},
    {.name = "ladder/04_wmma", .block_q = 16, .block_kv = 32, .num_warps = 1, .shared_bytes = wmma_bytes},
    {.name = "ladder/05_wmma_block", .block_q = 64, .block_kv = 32, .num_warps = 4, .shared_bytes = wmma_bytes},
    {.name = "ladder/05a_fragments", .block_q = 64, .block_kv = 32, .num_warps = 4, .shared_bytes = fragment_bytes},
    {.name = "ladder/06_mma", .block_q = 64, .block_kv = 64, .num_warps = 4, .shared_bytes = plain_bytes},
    {.name = "ladder/07_swizzle", .block_q = 64, .block_kv = 64, .num_warps = 4, .shared_bytes = swizzled_bytes},
    {.name = "ladder/08_q_registers",
     .block_q = 64,
     .block_kv = 64,
     .num_warps = 4,
     .min_blocks_per_sm = 2,
     .shared_bytes = swizzled_bytes},
    {.name = "ladder/09_async",
     .block_q = 64,
     .block_kv = 64,
     .num_warps = 4,
     .num_stages = 2,
     .min_blocks_per_sm = 2,
     .shared_bytes = swizzled_bytes},
    {.name = "ladder/10_causal",
     .block_q = 64,
     .block_kv = 64,
     .num_warps = 4,
     .num_stages = 2,
     .min_blocks_per_sm = 2,
     .shared_bytes = swizzled_bytes},
    {.name = "ladder/10a_names",
     .block_q = 64,
     .block_kv = 64,
     .num_warps = 4,
     .num_stages = 2,
     .min_blocks_per_sm = 2,
     .shared_bytes = swizzled_bytes},
    {.name = "ladder/10b_roles",
     .block_q = 64,
     .block_kv = 64,
     .num_warps = 4,
     .num_stages = 2,
     .min_blocks_per_sm = 2,
     .shared_bytes = swizzled_bytes},
    {.name = "ladder/10c_struct",
     .block_q = 64,
     .block_kv = 64,
     .num_warps = 4,
     .num_stages = 2,
     .min_blocks_per_sm = 2,
     .shared_bytes = swizzled_bytes},
    {.name = "ladder/11_tma",
     .arch = 90,
     .block_q = 64,
     .block_kv = 64,
     .num_warps = 4,
     .num_stages = 2,
     .min_blocks_per_sm = 2,
     .tma = true,
     .shared_bytes = tma_bytes},
    wgmma_rung("ladder/12_wgmma", 8),
    wgmma_rung("ladder/13_warp_specialised", 12),
    wgmma_rung("ladder/14_overlap", 12),
    wgmma_rung("ladder/15_reference_max", 12),
    {.name = "ladder/16_persistent",
     .arch = 90,
     .block_q = 128,
     .block_kv = 128,
     .num_warps = 12,
     .num_stages = 2,
     .wgmma = true,
     .tma = true,
     .persistent = true,
     .shared_bytes = persistent_bytes},
    {.name = "ladder/17_fp8",
     .arch = 90,
     .block_q = 128,
     .block_kv = 128,
     .num_warps = 12,
     .num_stages = 2,
     .wgmma = true,
     .tma = true,
     .narrow = true,
     .shared_bytes = narrow_bytes,
     .add_launches = add_narrow_launches},
    {.name = "ladder/b0_naive",
     .pass = Pass::backward,
     .float32 = true,
     .block_q = 4,
     .block_kv = 4,
     .num_warps = 4,
     .add_launches = add_backward_launches},
    {.name = "ladder/b0a_tiled_dq",
     .pass = Pass::backward,
     .float32 = true,
     .block_q = 32,
     .block_kv = 32,
     .num_warps = 4,
     .shared_bytes = backward_tile_bytes,
     .add_launches = add_backward_launches},
    {.name = "ladder/b1_tiled",
     .pass = Pass::backward,
     .float32 = true,
     .block_q = 32,
     .block_kv = 32,
     .num_warps = 4,
     .shared_bytes = backward_tile_bytes,
     .add_launches = add_backward_launches},
    {.name = "ladder/b1a_mma_dq",
     .pass = Pass::backward,
     .block_q = 64,
     .block_kv = 32,
     .num_warps = 4,
     .shared_bytes = backward_mixed_bytes,
     .add_launches = add_backward_launches},
    {.name = "ladder/b2_mma",
     .pass = Pass::backward,
     .block_q = 64,
     .block_kv = 64,
     .num_warps = 4,
     .min_blocks_per_sm = 2,
     .shared_bytes = backward_mma_bytes,
     .add_launches = add_backward_launches},
    {.name = "ladder/b3_async",
     .pass = Pass::backward,
     .block_q = 64,
     .block_kv = 64,
     .num_warps = 4,
     .num_stages = 2,
     .min_blocks_per_sm = 2,
     .shared_bytes = backward_mma_bytes,
     .add_launches = add_backward_launches},
    {.name = "ladder/d0_split",
     .block_q = 64,
     .block_kv = 64,
     .num_warps = 4,
     .num_stages = 2,
     .min_blocks_per_sm = 2,
     .shared_bytes = swizzled_bytes,
     .add_launches = add_split_launches},
});

std::string reject(const Rung& rung, const Request& request) {
  const Problem& problem = request.problem;
  const DeviceInfo& device = request.device;
  if (device.arch < rung.arch) return "needs sm_" + std::to_string(rung.arch);
  if (rung.wgmma && device.arch != 90) return "wgmma needs sm_90; this is sm_" + std::to_string(device.arch);
  if (problem.dtype == Dtype::float32 && !rung.float32) return "needs a 16-bit dtype";
  if (rung.narrow && (*problem.q_dtype != Dtype::float8_e4m3 || problem.kv_scales != ScaleKind::none ||
                      problem.q_scales != ScaleKind::none))
    return "needs q, k and v of float8_e4m3 without scales";
  if (std::string reason = reject_for_all_rungs(request); !reason.empty()) return reason;
  const double blocks =
      static_cast<double>(problem.batch * problem.heads_q) * static_cast<double>(problem.seq_q) *
      static_cast<double>(rung.add_launches == add_standard_launches ? ceil_div(problem.seq_kv, rung.block_kv) : 1);
  if (blocks > std::numeric_limits<int>::max()) return "more than 2^31 blocks";
  if (rung.shared_bytes && rung.shared_bytes(rung, static_cast<int>(problem.head_dim)) > device.shared_bytes)
    return "needs more shared memory";
  if (!rung.tma) return "";
  if (problem.total_q == 0 || problem.total_kv == 0) return "there is nothing to load";
  return reject_tma_strides(problem, Pass::forward);
}

Plan lay_out(const Rung& rung, const Problem& problem, const DeviceInfo& device) {
  Plan plan{.block_q = rung.block_q, .block_kv = rung.block_kv};
  if (rung.add_launches) {
    rung.add_launches(rung, problem, plan);
  } else {
    const std::int64_t blocks = problem.batch * problem.heads_q * ceil_div(problem.seq_q, rung.block_q);
    add_launch(plan, forward_launch(rung, problem, "attention"),
               rung.persistent ? std::min<std::int64_t>(blocks, device.num_sms) : blocks);
  }
  if (rung.tma) {
    plan.maps =
        rung.narrow ? forward_sm90_fp8_maps(problem, plan) : forward_sm90_maps(problem, rung.block_q, rung.block_kv);
  }
  return plan;
}

Answer plan_rung(const Rung& rung, const Request& r) {
  return offer_unless(reject(rung, r), [&] { return lay_out(rung, r.problem, r.device); });
}

constexpr std::string_view requirements_of(const Rung& rung) {
  if (rung.narrow) return "a rung of the ladder: dense, causal or not, head_dim to 128, q, k and v of float8_e4m3";
  return rung.float32 ? "a rung of the ladder: dense, causal or not, head_dim to 128, every dtype"
                      : "a rung of the ladder: dense, causal or not, head_dim to 128, 16-bit dtypes";
}

template <std::size_t... index>
std::vector<KernelEntry> entries(std::index_sequence<index...>) {
  return {KernelEntry{.name = table[index].name,
                      .pass = table[index].pass,
                      .device = DeviceKind::cuda,
                      .requirements = requirements_of(table[index]),
                      .takes = {.narrow_keys = table[index].narrow, .narrow_queries = table[index].narrow},
                      .automatic = false,
                      .plan = [](const Request& r) { return plan_rung(table[index], r); }}...};
}

}  // namespace

std::string reject_for_all_rungs(const Request& r) {
  const Problem& p = r.problem;
  const abi::Features& f = r.features;
  if (f.packed || f.seqused_q || f.seqused_kv || f.key_lengths) return "the ladder takes no packed or shortened sequences";
  if (f.window_left || p.window_right > 0) return "the ladder takes no window but causal";
  if (f.top_left) return "the ladder takes no top-left causal mask";
  if (f.bias || f.mask || f.alibi || f.softcap) return "the ladder takes no bias, mask or soft cap";
  if (f.dropout) return "the ladder takes no dropout";
  if (f.sink) return "the ladder takes no sink";
  if (p.head_dim != p.head_dim_v) return "the ladder needs head_dim_v = head_dim";
  if (p.head_dim > 128) return "the ladder needs a head_dim of at most 128";
  if (*p.scale <= 0) return "the ladder needs a positive scale";
  for (const Strides& strides :
       {p.q_strides, p.k_strides, p.v_strides, p.out_strides, p.dout_strides, p.dq_strides, p.dk_strides, p.dv_strides}) {
    if (strides.batch % 8 != 0 || strides.seq % 8 != 0 || strides.head % 8 != 0)
      return "the ladder needs strides that are multiples of 8";
  }
  return "";
}

std::span<const Rung> rungs() { return table; }

std::string unit_of(const Rung& rung) {
  std::string unit(rung.name);
  if (rung.pass == Pass::backward) unit.insert(std::string_view("ladder/").size(), "backward/");
  return unit;
}

std::span<const KernelEntry> ladder_kernels() {
  static const std::vector<KernelEntry> rows = entries(std::make_index_sequence<table.size()>());
  return rows;
}

}  // namespace flash_attention::plan
