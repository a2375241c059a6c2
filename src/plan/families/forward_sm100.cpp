#include "abi/forward_sm100.h"

#include <algorithm>
#include <array>

#include "abi/tensor_maps.h"
#include "plan/families/portable.h"
#include "plan/families/sm90.h"
#include "plan/features.h"
#include "plan/kernel_config.h"
#include "plan/kernel_table.h"
#include "plan/tensor_maps.h"
#include "support/ceil_div.h"

namespace flash_attention::plan {
namespace {

std::string reject(const Request& r) {
  const Problem& p = r.problem;
  const int arch = r.device.arch;
  if (arch != 100 && arch != 103) return "tcgen05 needs sm_100 or sm_103; this is sm_" + std::to_string(arch);
  if (r.device.shared_bytes < abi::forward_sm100_max_shared_bytes) return "a block needs 227 KiB of shared memory";
  if (p.dtype == Dtype::float32) return "takes float16 and bfloat16, not float32";
  if (p.head_dim % 8 != 0 || p.head_dim_v % 8 != 0) return "needs head dimensions that are multiples of 8";
  if (p.head_dim > 192 || p.head_dim_v > 128)
    return "tensor memory has room for a head_dim up to 192 and a head_dim_v up to 128";
  if (r.features.dropout) return "takes no dropout";
  if (!(*p.scale > 0)) return "scale must be positive: the maximum is taken before scaling";
  if (p.total_q == 0 || p.total_kv == 0) return "there is nothing to load";
  std::string reason = reject_grid(p);
  return reason.empty() ? reject_tma_strides(p, Pass::forward) : reason;
}

/// One Q tile if there are few queries, else two in turn; as many stages as fit, at most four or as requested.
abi::ForwardConfig choose_config(const Request& r) {
  const Problem& p = r.problem;
  const int block_q = r.tile ? static_cast<int>(r.tile->block_q) : p.seq_q <= abi::forward_sm100_rows ? 128 : 256;
  abi::ForwardConfig config{.features = forward_features(with_map(r.features)),
                            .head_dim = static_cast<int>(p.head_dim),
                            .head_dim_v = static_cast<int>(p.head_dim_v),
                            .block_q = block_q,
                            .block_kv = abi::forward_sm100_block_kv,
                            .num_warps = abi::forward_sm100_warps(block_q),
                            .num_stages = r.num_stages > 0 ? r.num_stages : 4};
  while (abi::forward_sm100_layout(config).shared_bytes > abi::forward_sm100_max_shared_bytes) --config.num_stages;
  return config;
}

std::vector<MapLayout> maps_of(const Problem& p) {
  using enum MapSource;
  using namespace abi::forward_sm90_maps;
  return {rows_map(map_Q, query_rows(p, q, p.q_strides, p.head_dim), 64),
          rows_map(map_K, key_rows(p, k, p.k_strides, p.head_dim), abi::forward_sm100_block_kv),
          rows_map(map_V, key_rows(p, v, p.v_strides, p.head_dim_v), abi::forward_sm100_block_kv)};
}

Answer plan_forward(const Request& r) {
  if (std::string reason = reject(r); !reason.empty()) return Refusal{std::move(reason)};
  if (r.tile && ((r.tile->block_q != 128 && r.tile->block_q != 256) || r.tile->block_kv != abi::forward_sm100_block_kv))
    return refuse_tile(*r.tile, "allowed are 128 and 256 queries, and 128 keys");
  const Problem& p = r.problem;
  const abi::ForwardConfig config = choose_config(r);
  if (r.num_stages > config.num_stages) return Refusal{"so many stages do not fit in shared memory"};
  Plan plan{.block_q = config.block_q, .block_kv = config.block_kv};
  plan.maps = maps_of(p);
  const std::int64_t tiles = ceil_div(p.seq_q, config.block_q) * p.heads_q * p.batch;
  add_launch(plan,
             {.unit = "forward/sm100",
              .entry = "forward_sm100_kernel",
              .config = launch_config(config),
              .block = 32 * config.num_warps,
              .shared_bytes = abi::forward_sm100_layout(config).shared_bytes},
             std::min<std::int64_t>(tiles, r.device.num_sms));
  return Offer{std::move(plan)};
}

}  // namespace

/// Never run on a GPU: proven nowhere.
std::span<const KernelEntry> sm100_kernels() {
  static const std::array<KernelEntry, 1> rows{KernelEntry{
      .name = "forward/sm100",
      .pass = Pass::forward,
      .device = DeviceKind::cuda,
      .requirements = "sm_100 or sm_103; float16 or bfloat16; head_dim up to 192, head_dim_v up to 128; strides "
                      "that TMA can take; no pages, no dropout",
      .takes = {.left_padding = true,
                .hidden_rows = true,
                .block_mask = true,
                .programs = true,
                .tile = true,
                .stages = true,
                .bit_mask = true,
                .sequence_windows = true},
      .prefill = true,
      .plan = plan_forward}};
  return rows;
}

}  // namespace flash_attention::plan
