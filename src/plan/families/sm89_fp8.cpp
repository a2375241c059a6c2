#include <algorithm>
#include <array>

#include "plan/families/mma.h"
#include "plan/families/portable.h"
#include "plan/kernel_table.h"

namespace flash_attention::plan {
namespace {

/// sm_90, sm_100 and sm_103 have no 8-bit mma.sync: the assembler makes 16 bits of codes in registers before each product.
bool unpacks_codes(const DeviceInfo& device) { return device.arch >= 90 && device.arch < 120; }

/// 32 rows a warp if so many fit in registers, else 16: pages need some, and unpacked codes.
MmaForwardTile tile_of(const Request& r, int block_q, int block_kv) {
  const std::int64_t dim = std::max(r.problem.head_dim, r.problem.head_dim_v);
  const bool wide_warps = block_q == 128 && block_kv <= 64 && dim <= 128 && !r.features.touches_scores() &&
                          !r.features.paged && !unpacks_codes(r.device);
  return {block_q, block_kv, block_q / (wide_warps ? 32 : 16)};
}

/// Masks are known for blocks of 64 keys. 128 x 64 takes 33 to 66 KB.
MmaForwardTile choose_tile(const Request& r) { return tile_of(r, r.problem.seq_q <= 64 ? 64 : 128, 64); }

std::string reject_strides(const Problem& p) {
  const auto multiples = [](const Strides& s, std::int64_t of) {
    return s.batch % of == 0 && s.seq % of == 0 && s.head % of == 0;
  };
  const bool codes = multiples(p.q_strides, 16) && multiples(p.k_strides, 16) && multiples(p.v_strides, 16);
  if (!codes) return "needs 8-bit rows whose strides are multiples of 16";
  return multiples(p.out_strides, 8) ? "" : "needs strides of out that are multiples of 8";
}

std::string reject(const Request& r) {
  const Problem& p = r.problem;
  if (r.device.arch < 89) return "needs sm_89";
  if (!r.features.narrow_queries) return "takes queries of float8_e4m3 or float8_e5m2";
  if (p.dtype == Dtype::float32) return "needs out of 16 bits";
  if (!(*p.scale > 0)) return "needs a positive scale";
  if (r.features.token_scales) return "takes no scales of rows";
  if (p.head_dim % 16 != 0 || p.head_dim_v % 16 != 0) return "needs head dimensions that are multiples of 16";
  if (std::max(p.head_dim, p.head_dim_v) > 256) return "needs head dimensions up to 256";
  if (std::string reason = reject_strides(p); !reason.empty()) return reason;
  return reject_grid(p);
}

std::string reject_tile(const Request& r, const TileSize& asked) {
  const auto [block_q, block_kv] = asked;
  if (block_q != 32 && block_q != 64 && block_q != 128) return "allowed are 32, 64 and 128 queries";
  if (block_kv != 32 && block_kv != 64 && block_kv != 96 && block_kv != 128) return "allowed are 32, 64, 96 and 128 keys";
  if (r.features.has_tile_map() && block_kv % 64 != 0) return "masks are known for blocks of 64 keys";
  return tile_of(r, block_q, block_kv).reject_size(r.problem, r.device);
}

Answer plan_fp8(const Request& r) {
  if (std::string reason = reject(r); !reason.empty()) return Refusal{std::move(reason)};
  MmaForwardTile tile = choose_tile(r);
  if (r.tile) {
    if (const std::string reason = reject_tile(r, *r.tile); !reason.empty()) return refuse_tile(*r.tile, reason);
    tile = tile_of(r, r.tile->block_q, r.tile->block_kv);
  }
  return offer_unless(tile.reject_size(r.problem, r.device), [&] {
    return lay_out_mma_forward(r.problem, tile, "forward/sm89_fp8", "forward_sm89_fp8");
  });
}

}  // namespace

std::span<const KernelEntry> sm89_fp8_kernels() {
  static const std::array<KernelEntry, 1> rows{KernelEntry{
      .name = "forward/sm89_fp8",
      .pass = Pass::forward,
      .device = DeviceKind::cuda,
      .requirements = "sm_89 and up; q, k and v of float8_e4m3 or float8_e5m2, out of float16 or bfloat16; head dimensions "
                      "and strides that are multiples of 16; no scales of rows",
      .takes = {.pages = true,
                .left_padding = true,
                .hidden_rows = true,
                .block_mask = true,
                .programs = true,
                .narrow_keys = true,
                .narrow_queries = true,
                .tile = true,
                .bit_mask = true,
                .sequence_windows = true},
      .plan = plan_fp8}};
  return rows;
}

}  // namespace flash_attention::plan
