#include <algorithm>
#include <array>
#include <limits>

#include "plan/features.h"
#include "plan/families/portable.h"
#include "plan/kernel_config.h"
#include "plan/kernel_table.h"
#include "plan/key_list.h"
#include "plan/workspace.h"

namespace flash_attention::plan {
namespace {

constexpr int block = 64;     // tile::block_rows
constexpr int num_warps = 8;  // tile::product_threads / 32
constexpr int key_tile_bytes = 68 * 4;  // and the padding of the tiles

/// Blocks, each of which takes 64 rows that share a list.
std::int64_t row_blocks(const Problem& p) {
  const std::int64_t chunks = (p.key_list.block_q * stacked_heads(p) + block - 1) / block;
  return p.batch * list_rows(p) * list_units(p) * chunks;
}

std::string reject(const Request& r) {
  const Problem& p = r.problem;
  if (!r.features.key_list) return "takes lists of keys alone";
  const std::int64_t most = std::max({row_blocks(p), p.batch * p.heads_kv * p.seq_kv, list_rows(p) * p.key_list.entries,
                                      p.key_list.block_q * stacked_heads(p)});
  return most > std::numeric_limits<int>::max() ? "more than 2^31 tiles, or entries of a sequence" : "";
}

Plan lay_out_forward(const Problem& p) {
  Plan plan{.block_q = block, .block_kv = block};
  const abi::ForwardConfig config{.features = features_of(p),
                                  .head_dim = static_cast<int>(p.head_dim),
                                  .head_dim_v = static_cast<int>(p.head_dim_v),
                                  .block_q = block,
                                  .block_kv = block,
                                  .num_warps = num_warps};
  add_launch(plan,
             {.unit = "forward/listed",
              .entry = "forward_listed",
              .config = launch_config(config),
              .block = 32 * num_warps,
              .shared_bytes = portable_shared_bytes + key_tile_bytes},
             row_blocks(p));
  return plan;
}

/// Chunks of the lists of a sequence, each with separate counts. The counts take no more memory than the lists.
std::int64_t list_chunks(const Problem& p) {
  constexpr std::int64_t most = 128;
  const std::int64_t fit = list_rows(p) * p.key_list.entries / std::max<std::int64_t>(list_key_units(p), 1);
  return std::clamp<std::int64_t>(fit, 1, std::clamp<std::int64_t>(list_rows(p), 1, most));
}

Plan lay_out_backward(const Problem& p) {
  Plan plan{.block_q = block, .block_kv = block};
  abi::BackwardConfig config = portable_backward_config(p);
  config.features = features_of(p);
  config.dbias = false;
  const std::int64_t planes = p.batch * p.key_list.heads, chunks = list_chunks(p);
  plan.num_splits = static_cast<int>(chunks);
  reserve_row_delta(p, plan);
  reserve(plan, abi::BackwardListedRegion::counts, planes * chunks * list_key_units(p) * 4);
  reserve(plan, abi::BackwardListedRegion::begins, planes * (list_key_units(p) + 1) * 4);
  reserve(plan, abi::BackwardListedRegion::lists, planes * list_rows(p) * p.key_list.entries * 4);
  add_delta_launch(p, plan);
  const auto add = [&](const char* entry, std::int64_t blocks, int shared_bytes) {
    add_launch(plan,
               {.unit = "backward/listed",
                .entry = entry,
                .config = launch_config(config),
                .block = 32 * num_warps,
                .shared_bytes = shared_bytes},
               blocks);
  };
  add("backward_listed_dq", row_blocks(p), portable_shared_bytes + key_tile_bytes);
  const std::int64_t keys = p.batch * p.heads_kv * p.seq_kv;
  if (keys > 0) {
    const int columns = static_cast<int>((p.head_dim + 31) / 32 + (p.head_dim_v + 31) / 32);
    add("backward_listed_count", planes * chunks, 0);
    add("backward_listed_offsets", planes, num_warps * 4);
    add("backward_listed_fill", planes * chunks, 0);
    add("backward_listed_dkv", keys, num_warps * 32 * columns * 4);
  }
  add_program_and_sink_launches(p, plan);
  return plan;
}

Answer plan_forward(const Request& r) {
  return offer_unless(reject(r), [&] { return lay_out_forward(r.problem); });
}
Answer plan_backward(const Request& r) {
  return offer_unless(reject(r), [&] { return lay_out_backward(r.problem); });
}

}  // namespace

std::span<const KernelEntry> listed_kernels() {
  static constexpr std::string_view requirements = "any GPU from sm_70, every dtype; lists of keys";
  static const std::array<KernelEntry, 2> rows{
      KernelEntry{.name = "forward/listed",
                  .pass = Pass::forward,
                  .device = DeviceKind::cuda,
                  .requirements = requirements,
                  .takes = {.pages = true, .left_padding = true, .latent = true, .key_list = true},
                  .plan = plan_forward},
      KernelEntry{.name = "backward/listed",
                  .pass = Pass::backward,
                  .device = DeviceKind::cuda,
                  .requirements = requirements,
                  .takes = {.key_list = true},
                  .plan = plan_backward}};
  return rows;
}

}  // namespace flash_attention::plan
