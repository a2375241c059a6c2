#include <algorithm>
#include <array>
#include <cstdlib>
#include <numeric>

#include "plan/families/cpu_regions.h"
#include "plan/families/cpu_tiles.h"
#include "plan/kernel_table.h"
#include "plan/key_list.h"
#include "plan/workspace.h"
#include "program/sizes.h"
#include "support/ceil_div.h"

namespace flash_attention::plan {
int cpu_block_q(CpuIsa isa) {
  switch (isa) {
    case CpuIsa::neon:
      return cpu_block_q_neon;
    case CpuIsa::avx2:
      return cpu_block_q_avx2;
    case CpuIsa::avx512:
    case CpuIsa::avx512_bf16:
    case CpuIsa::amx:
      return cpu_block_q_avx512;
    case CpuIsa::generic:
      break;
  }
  return cpu_block_q_generic;
}

namespace {

/// The cache of a core that sets thresholds: at most cpu_tuned_core_cache, which is also used if the device does not
/// tell.
std::int64_t cpu_core_cache(const DeviceInfo& device) {
  const std::int64_t known = device.core_cache_bytes > 0 ? device.core_cache_bytes : cpu_tuned_core_cache;
  return std::min<std::int64_t>(known, cpu_tuned_core_cache);
}

/// A plan with these tiles, and the limit of what the device's caches hold.
Plan plan_of_tiles(int block_q, int block_kv, const DeviceInfo& device) {
  Plan plan{.block_q = block_q, .block_kv = block_kv};
  plan.cpu.cache_resident_bytes = cpu_cache_resident_bytes(cpu_core_cache(device));
  return plan;
}

/// Whether cpu/prefill and cpu/backward work on copies: if more than two blocks of queries read K and V, and these have
/// 16 bits, or have gaps and do not stay in L2.
bool copies_keys(const Request& r, int block_q) {
  const Problem& problem = r.problem;
  if (r.features.window_left) return false;  // few blocks read a key
  if (*problem.kv_dtype != problem.dtype || problem.latent) return false;
  // seq_kv is a capacity: copies would have this size, however few keys there are
  if (problem.page_size != 0) return false;
  const std::int64_t blocks = ceil_div(problem.heads_q / problem.heads_kv * problem.seq_q, block_q);
  if (problem.dtype != Dtype::float32) return blocks > 2;
  const auto far_apart = [](const Strides& strides, std::int64_t dim) { return std::abs(strides.seq) > dim; };
  const std::int64_t kept = cpu_core_cache(r.device) / 2;  // up to the size of an L2, reading in place is as fast
  return blocks > 2 && problem.seq_kv * (problem.head_dim + problem.head_dim_v) * 4 > kept &&
         (far_apart(problem.k_strides, problem.head_dim) || far_apart(problem.v_strides, problem.head_dim_v));
}

/// Key heads that cpu/decode reads together: all heads whose rows are adjacent, if that helps.
int decode_heads(const Problem& problem, const DeviceInfo& device) {
  const bool side_by_side = problem.k_strides.head == problem.head_dim && problem.v_strides.head == problem.head_dim_v;
  const std::int64_t key_bytes =
      problem.heads_kv * (problem.head_dim + problem.head_dim_v) * static_cast<std::int64_t>(size_of(problem.dtype));
  const std::int64_t rows = problem.heads_q / problem.heads_kv * problem.seq_q;
  return cpu_decode_heads(rows, problem.heads_kv, problem.seq_kv, key_bytes,
                          cpu_cache_resident_bytes(cpu_core_cache(device)), side_by_side);
}

std::int64_t group(const Problem& problem) { return problem.heads_q / problem.heads_kv; }

/// Query rows of the call. Packed rows count once.
std::int64_t total_rows(const Problem& problem) {
  return problem.heads_q * (problem.packed ? problem.total_q : problem.batch * problem.seq_q);
}

/// The number of places for tiles of `unit` keys of all key heads.
std::int64_t key_places(const Problem& problem, int unit) {
  return problem.heads_kv * cpu_places(problem.packed, problem.batch, problem.seq_kv, problem.total_kv, unit);
}

/// Whether cpu/decode multiplies pairs of bfloat16 without conversion.
bool decodes_pairs(const Problem& problem, const DeviceInfo& device) {
  return device.isa == CpuIsa::avx512_bf16 && problem.dtype == Dtype::bfloat16 && problem.head_dim % 32 == 0 &&
         problem.head_dim_v % 32 == 0;
}

std::string too_many_rows(std::int64_t most, std::int64_t rows) {
  return "takes at most " + std::to_string(most) + " query rows of a key head, and there are " + std::to_string(rows);
}

std::string reject_decode(const Problem& problem, const DeviceInfo& device) {
  const std::int64_t rows = group(problem) * problem.seq_q;
  const int block_q = cpu_block_q(device.isa), most = std::min(cpu_decode_rows, block_q);
  if (rows > most) return too_many_rows(most, rows);
  if (rows > 4 && problem.seq_kv <= cpu_block_kv) return "more than 4 rows on one tile of keys are better off in lanes";
  const bool fill_lanes = rows > 11 && (rows <= 16 || block_q < cpu_block_q_avx512);
  if (!fill_lanes || decodes_pairs(problem, device) || decode_heads(problem, device) > 1) return {};
  return std::to_string(rows) + " query rows fill the lanes of cpu/prefill, and K and V stay in the caches";
}

std::string reject_backward_decode(const Problem& problem) {
  const std::int64_t rows = group(problem) * problem.seq_q;
  return rows <= cpu_backward_decode_rows ? std::string() : too_many_rows(cpu_backward_decode_rows, rows);
}

std::string reject_bfloat16(const Problem& problem, const DeviceInfo& device, int min_rows) {
  if (device.isa != CpuIsa::amx && device.isa != CpuIsa::avx512_bf16) {
    return "the instruction set is " + std::string(to_string(device.isa)) + ", not amx or avx512_bf16";
  }
  if (problem.dtype != Dtype::bfloat16) return "takes bfloat16, not " + std::string(to_string(problem.dtype));
  if (problem.head_dim % 8 != 0 || problem.head_dim_v % 8 != 0) return "needs head dimensions that are multiples of 8";
  const std::int64_t rows = group(problem) * problem.seq_q;
  if (rows < min_rows) {
    return "takes at least " + std::to_string(min_rows) + " query rows of a key head, and there are " +
           std::to_string(rows);
  }
  if (problem.seq_kv >= cpu_bfloat16_min_keys) return {};
  return "takes at least " + std::to_string(cpu_bfloat16_min_keys) + " keys, and there are " +
         std::to_string(problem.seq_kv);
}

std::string reject_forward_bfloat16(const Problem& problem, const DeviceInfo& device) {
  const std::int64_t scores = group(problem) * problem.seq_q * problem.seq_kv;
  const int min_rows = device.isa == CpuIsa::amx ? cpu_amx_min_rows : cpu_bfloat16_min_rows;
  const std::string reason = reject_bfloat16(problem, device, min_rows);
  if (reason.empty() && decodes_pairs(problem, device) && reject_decode(problem, device).empty()) {
    return "so few query rows are better off in cpu/decode, which multiplies pairs too";
  }
  if (!reason.empty() || scores >= cpu_bfloat16_min_scores) return reason;
  return "takes at least " + std::to_string(cpu_bfloat16_min_scores) + " scores of a key head, and there are " +
         std::to_string(scores);
}

std::string reject_backward_bfloat16(const Request& r) {
  if (r.features.bias) return "takes no bias";
  if (r.problem.program_gradients != 0) return "has no gradients of a program's tensors";
  return reject_bfloat16(r.problem, r.device, cpu_bfloat16_min_rows);
}

std::int64_t row_blocks(const Problem& problem, const Plan& plan) {
  return problem.batch * problem.heads_kv * ceil_div(group(problem) * problem.seq_q, plan.block_q);
}

/// The most splits of the keys: each has at least a few tiles, or a quarter of a million multiplications in fewer
/// tiles.
std::int64_t max_key_splits(const Problem& problem) {
  const std::int64_t a_key =
      std::max<std::int64_t>(problem.heads_q * problem.seq_q * (problem.head_dim + problem.head_dim_v), 1);
  const std::int64_t min_split = std::clamp<std::int64_t>(250'000 / a_key, 2 * cpu_block_kv, 8 * cpu_block_kv);
  return std::max<std::int64_t>(problem.seq_kv / min_split, 1);
}

/// Why there are not as many splits of the keys as requested.
std::string reject_splits(const Request& r) {
  const std::int64_t most = r.problem.invariant ? 1 : std::max<std::int64_t>(r.problem.seq_kv / (2 * cpu_block_kv), 1);
  return r.num_splits <= most ? "" : "there are not so many tiles of keys";
}

void reserve_splits(const Problem& problem, Plan& plan) {
  if (plan.num_splits == 1) return;
  reserve(plan, CpuRegion::split_sums, plan.num_splits * total_rows(problem) * cpu_padded(problem.head_dim_v) * 4);
  const int numbers = problem.return_entropy ? 3 : 2;  // for each row
  reserve(plan, CpuRegion::split_statistics, plan.num_splits * total_rows(problem) * numbers * 4);
}

/// Splits the keys if the blocks of rows do not keep all threads busy. `asked` is the number of splits, if it is not 0.
void split_keys(const Problem& problem, const DeviceInfo& device, std::int64_t blocks, int asked, Plan& plan) {
  if (asked > 0) {
    plan.num_splits = asked;
    return reserve_splits(problem, plan);
  }
  const std::int64_t wanted = device.threads > 1 ? ceil_div(2 * device.threads, std::max<std::int64_t>(blocks, 1)) : 1;
  const std::int64_t most = std::min(max_key_splits(problem), wanted);
  const auto rounds = [&](std::int64_t splits) { return ceil_div(blocks * splits, std::max(device.threads, 1)); };
  std::int64_t best = 1, best_rounds = rounds(1);  // the least time of the thread that has the most work
  for (std::int64_t splits = 2; splits <= most; ++splits) {
    const std::int64_t these = rounds(splits);
    if (these * best <= best_rounds * splits) best = splits, best_rounds = these;
  }
  plan.num_splits = static_cast<int>(best);
  reserve_splits(problem, plan);
}

/// Some blocks of rows go over the keys together, if K and V of a head do not stay in a near cache and there is still
/// enough work for all threads. Two blocks in forward: 5 to 20 % faster on a Xeon from 1 MB on, no slower on a Zen 4.
/// Four in backward, where dK and dV have to be read, too: on a Zen 4, float32, 8 heads of 128, 1000 tokens 166 with
/// two, 171 with four; 3000 tokens 153 and 165 GFLOP/s.
int together(const Problem& problem, std::int64_t items, const DeviceInfo& device, int most) {
  const std::int64_t near = cpu_core_cache(device) / 4;
  return items > 1 && problem.seq_kv * (problem.head_dim + problem.head_dim_v) * 4 > near ? most : 1;
}

/// Reserves copies of K and V as float, the rows of a head one after another.
void reserve_copies(const Request& r, Plan& plan) {
  const Problem& problem = r.problem;
  plan.cpu.copies_keys = copies_keys(r, plan.block_q);
  if (!plan.cpu.copies_keys) return;
  const std::int64_t rows = problem.heads_kv * (problem.packed ? problem.total_kv : problem.batch * problem.seq_kv);
  reserve(plan, CpuRegion::copied_K, rows * cpu_copied_stride(problem.head_dim) * 4);
  reserve(plan, CpuRegion::copied_V, rows * cpu_copied_stride(problem.head_dim_v) * 4);
}

Plan lay_out_forward(const Request& r) {
  const Problem& problem = r.problem;
  const DeviceInfo& device = r.device;
  Plan plan = plan_of_tiles(cpu_block_q(device.isa), cpu_block_kv, device);
  const std::int64_t blocks = row_blocks(problem, plan);
  if (!problem.invariant) split_keys(problem, device, blocks, r.num_splits, plan);
  if (plan.num_splits == 1) plan.block_q *= together(problem, blocks / (8 * std::max(device.threads, 1)), device, 2);
  reserve_copies(r, plan);
  return plan;
}

/// As forward, but a block of work is the rows of all key heads that are read together. If threads would have nothing
/// to do otherwise, fewer heads than possible are read together.
Plan lay_out_decode(const Problem& problem, const DeviceInfo& device, int asked_splits) {
  Plan plan = plan_of_tiles(cpu_block_q(device.isa), cpu_block_kv, device);
  int& together = plan.cpu.heads_together = decode_heads(problem, device);
  const auto blocks = [&] { return problem.batch * ceil_div(problem.heads_kv, together); };
  while (together > 1 && blocks() * max_key_splits(problem) < device.threads) together = (together + 1) / 2;
  split_keys(problem, device, blocks(), asked_splits, plan);
  return plan;
}

/// Reserves K padded to whole tiles, and V transposed, for every tile of keys.
Plan lay_out_bfloat16(const Problem& problem, const DeviceInfo& device, int asked_splits) {
  const bool amx = device.isa == CpuIsa::amx;
  Plan plan =
      plan_of_tiles(amx ? cpu_amx_block_q : cpu_block_q_avx512, amx ? cpu_amx_block_kv : cpu_avx512_bf16_block_kv, device);
  split_keys(problem, device, row_blocks(problem, plan), asked_splits, plan);
  // one block of rows packs its own keys, tile by tile
  if (group(problem) * problem.seq_q <= plan.block_q) return plan;
  plan.cpu.packs_keys = true;
  const std::int64_t keys = key_places(problem, plan.block_kv) * plan.block_kv;
  reserve(plan, CpuRegion::packed_K, keys * ceil_div(problem.head_dim, 32) * 32 * 2);
  reserve(plan, CpuRegion::packed_Vt, keys * ceil_div(problem.head_dim_v, 16) * 16 * 2);
  reserve(plan, CpuRegion::nonfinite_keys, keys / plan.block_kv * (plan.block_kv + 1));
  return plan;
}

/// The number of splits of each key head that gives all threads the same work in backward, if there are few heads. Each
/// split costs memory, and time for its sums.
std::int64_t even_splits(const Problem& problem, const DeviceInfo& device) {
  const std::int64_t heads = std::max<std::int64_t>(problem.batch * problem.heads_kv, 1);
  const std::int64_t threads = std::max(device.threads, 1);
  return heads >= 4 * threads ? 1 : std::min(threads / std::gcd(heads, threads), ceil_div(4 * threads, heads));
}

/// Splits of the keys, each with separate sums of dQ: if all rows of a key head go over the keys together.
void split_keys_backward(const Problem& problem, const DeviceInfo& device, Plan& plan) {
  if (!problem.invariant)
    plan.num_splits = static_cast<int>(std::min(max_key_splits(problem), even_splits(problem, device)));
  if (plan.num_splits > 1)
    reserve(plan, CpuRegion::split_dQ, plan.num_splits * total_rows(problem) * cpu_padded(problem.head_dim) * 4);
}

/// Splits of the keys, or of the queries, each with separate sums of dK and dV. block_q: rows of a block; max_blocks:
/// blocks that may go over the keys together.
Plan lay_out_any_backward(const Request& r, int block_q, std::int64_t max_blocks) {
  const Problem& problem = r.problem;
  const DeviceInfo& device = r.device;
  Plan plan = plan_of_tiles(block_q, cpu_block_kv, device);
  if (r.features.sink) reserve(plan, CpuRegion::sink_terms, total_rows(problem) * 4);
  const std::int64_t blocks = ceil_div(group(problem) * problem.seq_q, plan.block_q);
  if (problem.invariant) max_blocks = 1;
  if (blocks <= max_blocks) {
    plan.block_q *= static_cast<int>(std::max<std::int64_t>(blocks, 1));
    split_keys_backward(problem, device, plan);
    return plan;
  }
  // The number of a block decides to which split it belongs. So if every call has the same number of splits, dK and dV
  // are the same sums. A split without blocks (all but the first, if there is one block) adds zeros.
  plan.num_splits = problem.invariant ? cpu_invariant_splits
                                      : static_cast<int>(std::clamp<std::int64_t>(ceil_div(blocks, 2), 1,
                                                                                  even_splits(problem, device)));
  const std::int64_t columns = cpu_sums_stride(problem.head_dim, problem.head_dim_v);
  reserve(plan, CpuRegion::key_gradients, plan.num_splits * key_places(problem, cpu_key_unit) * cpu_key_unit * columns * 4);
  return plan;
}

Plan lay_out_backward_decode(const Request& r) {
  return lay_out_any_backward(r, cpu_block_q(r.device.isa), 1);
}

Plan lay_out_backward(const Request& r) {
  const Problem& problem = r.problem;
  const DeviceInfo& device = r.device;
  Plan plan = lay_out_any_backward(r, cpu_block_q(device.isa), cpu_blocks_of_a_head);
  const std::int64_t items = ceil_div(group(problem) * problem.seq_q, plan.block_q) / plan.num_splits;
  plan.block_q *= together(problem, items, device, cpu_blocks_together);
  reserve_copies(r, plan);
  if (problem.return_key_mass) reserve(plan, CpuRegion::mass_terms, total_rows(problem) * 4);
  if (problem.program_gradients != 0) {
    reserve(plan, CpuRegion::program_gradients, program::gradient_layout(problem, *program::parsed(problem.program)).bytes);
  }
  return plan;
}

/// K, V and K^T for every tile of keys; see lay_out_bfloat16.
Plan lay_out_backward_bfloat16(const Request& r) {
  const Problem& problem = r.problem;
  const DeviceInfo& device = r.device;
  const bool amx = device.isa == CpuIsa::amx;
  Plan plan = lay_out_any_backward(r, amx ? cpu_amx_block_q : cpu_block_q(device.isa), 1);
  plan.block_kv = amx ? cpu_amx_block_kv : cpu_avx512_bf16_block_kv;
  const std::int64_t tiles = key_places(problem, plan.block_kv);
  for (const auto& [region, head_dim] : {std::pair{CpuRegion::packed_K, problem.head_dim},
                                         {CpuRegion::packed_V, problem.head_dim_v},
                                         {CpuRegion::packed_Kt, problem.head_dim}}) {
    reserve(plan, region, tiles * plan.block_kv * ceil_div(head_dim, 32) * 32 * 2);
  }
  reserve(plan, CpuRegion::nonfinite_tiles, tiles);
  return plan;
}

/// Reserves whole score matrices: S (then P), and for backward dS.
Plan lay_out_standard(const Request& r, bool backward) {
  const Problem& problem = r.problem;
  const DeviceInfo& device = r.device;
  Plan plan = plan_of_tiles(cpu_block_q(device.isa), cpu_block_kv, device);
  const std::int64_t rows = group(problem) * problem.seq_q, total = group(problem) * problem.total_q;
  const std::int64_t blocks = problem.heads_kv * cpu_places(problem.packed, problem.batch, rows, total, plan.block_q);
  const std::int64_t matrix = blocks * plan.block_q * problem.seq_kv * 4;
  reserve(plan, CpuRegion::S, matrix);
  if (!backward) return plan;
  reserve(plan, CpuRegion::dS, matrix);
  if (r.features.sink) reserve(plan, CpuRegion::sink_terms, total_rows(problem) * 4);
  return plan;
}

Answer plan_forward_bfloat16(const Request& r) {
  std::string reason = reject_forward_bfloat16(r.problem, r.device);
  if (reason.empty()) reason = reject_splits(r);
  return offer_unless(std::move(reason), [&] { return lay_out_bfloat16(r.problem, r.device, r.num_splits); });
}
Answer plan_decode(const Request& r) {
  std::string reason = reject_decode(r.problem, r.device);
  if (reason.empty()) reason = reject_splits(r);
  return offer_unless(std::move(reason), [&] { return lay_out_decode(r.problem, r.device, r.num_splits); });
}
Answer plan_forward(const Request& r) {
  return offer_unless(reject_splits(r), [&] { return lay_out_forward(r); });
}

constexpr const char* depends_on_the_call = "the order of its sums depends on the call, and bits are invariant";

Answer plan_backward_bfloat16(const Request& r) {
  if (r.problem.invariant) return Refusal{depends_on_the_call};
  return offer_unless(reject_backward_bfloat16(r), [&] { return lay_out_backward_bfloat16(r); });
}
Answer plan_backward_decode(const Request& r) {
  if (r.problem.invariant) return Refusal{depends_on_the_call};
  return offer_unless(reject_backward_decode(r.problem), [&] { return lay_out_backward_decode(r); });
}
Answer plan_backward(const Request& r) { return Offer{lay_out_backward(r)}; }

Plan lay_out_listed_backward(const Request& r) {
  const Problem& problem = r.problem;
  const DeviceInfo& device = r.device;
  Plan plan = plan_of_tiles(cpu_block_q(device.isa), cpu_block_kv, device);
  if (r.features.sink) reserve(plan, CpuRegion::sink_terms, total_rows(problem) * 4);
  plan.num_splits = static_cast<int>(std::clamp<std::int64_t>(list_rows(problem), 1, even_splits(problem, device)));
  const std::int64_t columns = cpu_sums_stride(problem.head_dim, problem.head_dim_v);
  reserve(plan, CpuRegion::key_gradients,
          plan.num_splits * key_places(problem, cpu_key_unit) * cpu_key_unit * columns * 4);
  return plan;
}

std::string reject_listed(const Request& r) { return r.features.key_list ? "" : "takes lists of keys alone"; }

Answer plan_listed(const Request& r) {
  return offer_unless(reject_listed(r),
                      [&] { return plan_of_tiles(cpu_block_q(r.device.isa), cpu_block_kv, r.device); });
}
Answer plan_listed_backward(const Request& r) {
  return offer_unless(reject_listed(r), [&] { return lay_out_listed_backward(r); });
}

Plan lay_out_tangent(const Request& r) { return plan_of_tiles(cpu_block_q(r.device.isa), cpu_block_kv, r.device); }

/// As cpu/backward with one block of rows at a time, and the numbers that its first step computes for each row.
Plan lay_out_second(const Request& r) {
  const Problem& problem = r.problem;
  Plan plan = plan_of_tiles(cpu_block_q(r.device.isa), cpu_block_kv, r.device);
  if (r.features.sink) reserve(plan, CpuRegion::sink_terms, total_rows(problem) * 4);
  const std::int64_t blocks = ceil_div(group(problem) * problem.seq_q, plan.block_q);
  plan.num_splits =
      static_cast<int>(std::clamp<std::int64_t>(ceil_div(blocks, 2), 1, even_splits(problem, r.device)));
  const std::int64_t columns = cpu_sums_stride(problem.head_dim, problem.head_dim_v);
  reserve(plan, CpuRegion::key_gradients, plan.num_splits * key_places(problem, cpu_key_unit) * cpu_key_unit * columns * 4);
  reserve(plan, CpuRegion::second_rows, total_rows(problem) * 3 * 4);
  return plan;
}

std::string reject_derivatives(const Problem& problem) {
  return problem.invariant ? "the order of its sums is another than that of forward and backward, and bits are invariant" : "";
}

Answer plan_tangent(const Request& r) {
  return offer_unless(reject_derivatives(r.problem), [&] { return lay_out_tangent(r); });
}
Answer plan_second(const Request& r) {
  std::string reason = reject_derivatives(r.problem);
  if (r.features.score_program) reason = "has no second derivatives of a program's score";
  return offer_unless(std::move(reason), [&] { return lay_out_second(r); });
}

Answer plan_standard_forward(const Request& r) { return Offer{lay_out_standard(r, false)}; }
Answer plan_standard_backward(const Request& r) { return Offer{lay_out_standard(r, true)}; }

constexpr std::array<KernelEntry, 12> entries{{
    {.name = "cpu/bfloat16",
     .pass = Pass::forward,
     .device = DeviceKind::cpu,
     .requirements = "AMX or AVX512-BF16; bfloat16; head dimensions that are multiples of 8; at least 17 query rows of a "
                     "key head (seq_q * heads_q / heads_kv), 5 "
                     "with AMX, 17 keys and 576 scores; with AVX512-BF16 not what cpu/decode multiplies in pairs",
     .takes = {.left_padding = true,
               .hidden_rows = true,
               .block_mask = true,
               .programs = true,
               .splits = true,
               .bit_mask = true,
               .sequence_windows = true},
     .plan = plan_forward_bfloat16},
    {.name = "cpu/decode",
     .pass = Pass::forward,
     .device = DeviceKind::cpu,
     .requirements =
         "at most 24 query rows of a key head (seq_q * heads_q / heads_kv), 4 where there are at most 64 keys; not "
         "12 to 16 where cpu/prefill is faster",
     .takes = {.pages = true,
               .left_padding = true,
               .hidden_rows = true,
               .block_mask = true,
               .narrow_keys = true,
               .grouped_keys = true,
               .splits = true,
               .bit_mask = true,
               .sequence_windows = true},
     .plan = plan_decode},
    {.name = "cpu/prefill",
     .pass = Pass::forward,
     .device = DeviceKind::cpu,
     .requirements = "none",
     .takes = {.pages = true,
               .left_padding = true,
               .invariant = true,
               .hidden_rows = true,
               .block_mask = true,
               .programs = true,
               .narrow_keys = true,
               .grouped_keys = true,
               .narrow_queries = true,
               .latent = true,
               .splits = true,
               .statistics = true,
               .bit_mask = true,
               .sequence_windows = true},
     .plan = plan_forward},
    {.name = "cpu/bfloat16",
     .pass = Pass::backward,
     .device = DeviceKind::cpu,
     .requirements = "AMX or AVX512-BF16; bfloat16; head dimensions that are multiples of 8; no bias, no "
                     "gradients of a program's tensors; at least 17 query rows of a key head and 17 keys",
     .takes = {.hidden_rows = true, .block_mask = true, .programs = true},
     .plan = plan_backward_bfloat16},
    {.name = "cpu/decode",
     .pass = Pass::backward,
     .device = DeviceKind::cpu,
     .requirements = "at most 8 query rows of a key head (seq_q * heads_q / heads_kv)",
     .takes = {.hidden_rows = true, .block_mask = true},
     .plan = plan_backward_decode},
    {.name = "cpu/backward",
     .pass = Pass::backward,
     .device = DeviceKind::cpu,
     .requirements = "none",
     .takes = {.hidden_rows = true, .block_mask = true, .programs = true, .statistics = true},
     .plan = plan_backward},
    {.name = "cpu/listed",
     .pass = Pass::forward,
     .device = DeviceKind::cpu,
     .requirements = "lists of keys",
     .takes = {.pages = true, .left_padding = true, .latent = true, .key_list = true},
     .plan = plan_listed},
    {.name = "cpu/listed",
     .pass = Pass::backward,
     .device = DeviceKind::cpu,
     .requirements = "lists of keys",
     .takes = {.key_list = true},
     .plan = plan_listed_backward},
    {.name = "cpu/tangent",
     .pass = Pass::tangent,
     .device = DeviceKind::cpu,
     .requirements = "none",
     .takes = {.hidden_rows = true, .block_mask = true, .programs = true},
     .plan = plan_tangent},
    {.name = "cpu/second",
     .pass = Pass::second,
     .device = DeviceKind::cpu,
     .requirements = "no program that changes scores",
     .takes = {.hidden_rows = true, .block_mask = true, .programs = true},
     .plan = plan_second},
    {.name = "cpu/standard",
     .pass = Pass::standard_forward,
     .device = DeviceKind::cpu,
     .requirements = "none; keeps whole score matrices",
     .takes = {.hidden_rows = true, .block_mask = true},
     .plan = plan_standard_forward},
    {.name = "cpu/standard",
     .pass = Pass::standard_backward,
     .device = DeviceKind::cpu,
     .requirements = "none; keeps whole score matrices",
     .takes = {.hidden_rows = true, .block_mask = true},
     .plan = plan_standard_backward},
}};

}  // namespace

std::span<const KernelEntry> cpu_kernels() { return entries; }

}  // namespace flash_attention::plan
