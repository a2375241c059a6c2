#include "plan/families/backward_sm90/structure.h"

#include <algorithm>

#include "support/ceil_div.h"

namespace flash_attention::plan {
namespace {

/// Whether tasks can accumulate into dQ in order without long waits. Under a causal mask they reach a query tile one
/// after another. Otherwise all tasks of a head begin together, and each waits until the one before is a step ahead.
/// The last one waits as many steps as a head has tiles of keys, so these must be few compared with the work of an SM.
bool can_be_ordered(const Request& r) {
  const Problem& p = r.problem;
  if (r.features.window_right && p.seq_q >= p.seq_kv) return true;
  return ceil_div(p.total_q, tile_rows) * p.heads_q >= 10 * r.device.num_sms;
}

/// If it is known which block is the first to add to dQ, that block can store instead, and the sums need not be zeroed.
/// That gains about 64 / length of the time. It costs the order of the tasks: under a causal mask the longest tasks are
/// last, about 0.6 of an SM's mean task. In a window all tasks have the same length.
bool gains_by_order(const Request& r, std::int64_t block_kv) {
  const Problem& p = r.problem;
  const abi::Features& f = r.features;
  const std::int64_t tasks = ceil_div(p.total_kv, block_kv) * p.heads_kv, sms = r.device.num_sms;
  if (chooses_steps(f) || f.score_program || p.heads_q != p.heads_kv || p.seq_q < p.seq_kv || tasks < 4 * sms) return false;
  if (!f.window_right) return !f.window_left && p.seq_kv <= 512;
  if (f.window_left && (p.window_left + p.window_right) * 4 <= p.seq_kv) return true;
  return tasks * 100 >= p.total_kv / std::max<std::int64_t>(p.batch, 1) * sms;
}

/// Whether one tile has all keys of a head, and every query sees some of them. Then a task does all the work of its
/// head. It prepares its own queries, one tile after another, so these must be few.
bool can_be_direct(const Request& r) {
  const Problem& p = r.problem;
  const abi::Features& f = r.features;
  constexpr std::int64_t max_keys = 2 * tile_rows, max_queries = 8 * tile_rows;
  const bool lengths = f.has_lengths();
  const bool light = !f.bias && !chooses_steps(f) && !f.score_program && !f.sink;
  const bool every_query_sees = !f.window_left && (!f.window_right || p.seq_q <= p.seq_kv);
  return light && !lengths && every_query_sees && std::max(p.head_dim, p.head_dim_v) <= 128 && p.head_dim_v <= p.head_dim &&
         p.seq_kv <= max_keys && p.seq_q * p.heads_q <= max_queries * p.heads_kv;
}

}  // namespace

bool has_registers_for_three(const abi::Features& f) {
  const bool light = !f.bias && !f.score_program;
  const int light_options = int{f.softcap} + int{f.alibi} + int{f.dropout};
  const bool crowded = f.dropout && (f.packed || f.seqused_q || f.seqused_kv);
  return light && light_options <= 1 && !crowded && !chooses_steps(f);  // they have 160 registers a thread
}

BackwardSm90Structure choose_backward_sm90_structure(const Request& r, bool whole) {
  const Problem& p = r.problem;
  const abi::Features& f = r.features;
  const std::int64_t dim = std::max(p.head_dim, p.head_dim_v);
  // Options that read no memory need few registers: soft cap, ALiBi, dropout.
  const bool light = !f.bias && !f.score_program;
  const int light_options = int{f.softcap} + int{f.alibi} + int{f.dropout};
  const bool plain = light && !chooses_steps(f) && light_options == 0;
  // If bits are invariant, lengths must not decide anything: every problem counts as if it had some.
  const bool has_lengths = f.packed || f.seqused_q || f.seqused_kv || p.invariant;
  const bool crowded = f.dropout && has_lengths;
  if (dim > 128) return {.wide = true, .dq_mode = abi::DqMode::separate_kernel, .warpgroups = 1, .stages = plain ? 3 : 2};
  if (whole && !p.invariant && can_be_direct(r))
    return {.dq_mode = abi::DqMode::direct, .warpgroups = 2, .stages = dim > 64 ? 2 : 3};
  BackwardSm90Structure structure{.warpgroups = 2, .stages = 2};
  if (dim > 64) {
    // Other options need the registers that dQ would take, except a single 16-bit bias or a single short program.
    const bool lengths = has_lengths || f.has_mask_data();
    const bool alone = !f.mask && light_options == 0 && !lengths;
    const bool bias_alone = alone && f.bias && size_of(p.bias.dtype) == 2 && !f.score_program;
    const ProgramTraits& program = r.program;
    constexpr int few_values = 8;  // tests/kernels/program_compile_test.cpp
    const bool is_short = program.values <= few_values && !program.loads_scores && !program.hides && !program.calls;
    const bool usual = p.head_dim == 128 && p.head_dim_v == 128;  // at 96 some of them spill
    const bool program_alone = alone && !f.bias && program.score && is_short && usual;
    if (!(light || bias_alone || program_alone) || crowded) structure.dq_mode = abi::DqMode::separate_kernel;
  } else {
    // If there are few tasks, those of two warpgroups are shorter.
    const bool few = ceil_div(p.seq_kv, 2 * tile_rows) * p.heads_kv * p.batch <= 2 * r.device.num_sms && !p.packed &&
                     p.heads_q == p.heads_kv && !p.invariant;
    structure.warpgroups = has_registers_for_three(f) && !few && !(p.invariant && crowded) ? 3 : 2;
    structure.stages = 3;
  }
  if (structure.dq_mode == abi::DqMode::separate_kernel) return structure;
  if (p.deterministic) {
    const bool ordered = !chooses_steps(f) && !f.score_program && (p.invariant || can_be_ordered(r));
    structure.dq_mode = ordered ? abi::DqMode::ordered : abi::DqMode::separate_kernel;
  } else if (gains_by_order(r, structure.warpgroups * tile_rows)) {
    structure.dq_mode = abi::DqMode::ordered;
  }
  return structure;
}

/// At head dimension 128 few registers are left. One option that reads no memory has room in addition to dP, if
/// statistics are read late and steps do not overlap; with ALiBi they may overlap. With more options, and without a
/// causal mask also with sums of dK and dV, dP is computed after P. A task that has all keys has few steps: pairs are
/// not worth their code, which must be fetched from memory. Only backward/sm90/two_warpgroups has a choice.
abi::BackwardLoop choose_loop(const abi::BackwardConfig& config) {
  const abi::Features& f = config.features;
  const auto width = [](int dim) { return ceil_div(dim, 32) * 32; };
  const bool two_warpgroups = config.block_kv == 2 * tile_rows;
  const bool is_short = width(config.head_dim) + width(config.head_dim_v) > 192 && f.touches_scores();
  const bool one_option =
      !f.bias && !f.score_program && !f.mask && !f.has_tile_map() && int{f.softcap} + int{f.alibi} + int{f.dropout} == 1;
  const bool next_sequence_rows = f.packed || f.seqused_q;
  const bool serial = (is_short && !one_option) || (config.key_sums && (next_sequence_rows || !f.window_right));
  const bool sums_dq = config.dq_mode == abi::DqMode::atomic || config.dq_mode == abi::DqMode::ordered;
  abi::BackwardLoop loop{.tests_cap = f.softcap && !f.score_program && !(is_short && next_sequence_rows)};
  if (!two_warpgroups) return loop;
  loop.late_statistics = !config.statistics_by_product && (serial || is_short);
  if (serial) {
    loop.overlap = abi::Overlap::serial_dP;
  } else if (sums_dq && (!is_short || f.alibi)) {
    loop.overlap = abi::Overlap::pairs;
  }
  return loop;
}

// Tasks ---------------------------------------------------------------------------------------------------------------

bool chooses_steps(const abi::Features& f) { return f.has_mask_data() || f.mask; }

int num_gqa_splits(const Problem& p, const DeviceInfo& device, const abi::BackwardConfig& config) {
  const bool staged = (p.head_dim_v + 31) / 32 <= (p.head_dim + 31) / 32;  // dV is stored by way of dQ's staging buffer
  if (config.dq_mode == abi::DqMode::separate_kernel || !staged) return 1;
  const abi::Features& f = config.features;
  if (f.touches_scores() && std::max(p.head_dim, p.head_dim_v) > 64) return 1;  // they have taken the registers
  const std::int64_t group = p.heads_q / std::max<std::int64_t>(p.heads_kv, 1);
  const std::int64_t tasks = ceil_div(p.seq_kv, config.block_kv) * p.heads_kv * p.batch, sms = device.num_sms;
  const bool causal = f.window_right && !f.window_left;
  const auto divided_until = [&](auto enough) {
    std::int64_t parts = 1;
    while (parts < group && (group % parts != 0 || !enough(tasks * parts))) ++parts;
    return static_cast<int>(parts);
  };
  // Without a mask all tasks have the same length: few SMs may be idle in the last round.
  if (!causal) return divided_until([&](std::int64_t count) { return count * 100 >= ceil_div(count, sms) * sms * 85; });
  // Under a causal mask the longest tasks have twice the mean work. A split costs sums in memory. So heads are split
  // only if necessary, and then until SMs end together although, for the sake of L2, one head is processed after
  // another.
  const int needed = tasks * 10 >= 19 * sms ? 1 : divided_until([&](std::int64_t count) { return count >= 14 * sms; });
  // The heads of a large group, one after another, need more than L2 holds for all SMs at the same time. So a task has
  // two of them. If tasks are short, or groups have four heads, the sums cost more than that gains
  // (docs/lab/backward_sm90.md).
  constexpr std::int64_t large_group = 8, long_sequence = 2048;
  const bool pays = group >= large_group && group % 2 == 0 && std::min(p.seq_q, p.seq_kv) >= long_sequence &&
                    std::max(p.head_dim, p.head_dim_v) > 64 && !p.packed && !p.deterministic;
  return pays ? std::max(needed, static_cast<int>(group / 2)) : needed;
}

bool interleaves_heads(const Problem& p, const DeviceInfo& device, const abi::BackwardConfig& config) {
  const std::int64_t row_bytes = 6 * p.head_dim + 2 * p.head_dim_v;  // of Q and its sums, and of dO
  return config.dq_mode == abi::DqMode::atomic && !config.features.has_window() && !chooses_steps(config.features) &&
         !p.packed && 4 * p.seq_q <= p.seq_kv && 2 * p.total_q * p.heads_q * row_bytes <= device.l2_bytes;
}

bool splits_first(const Problem& p, const abi::BackwardConfig& config) {
  // At 64 columns this makes the compiler schedule the loop worse that reads the bytes of a boolean mask: random masks
  // of 8192 on an H200 fell from 270 to 248 TFLOP/s; at 128 columns they rose from 415 to 420.
  if (config.features.mask && std::max(p.head_dim, p.head_dim_v) <= 64) return false;
  return chooses_steps(config.features) && config.dq_mode == abi::DqMode::atomic && !config.key_sums && !p.packed &&
         p.head_dim_v <= p.head_dim;
}

}  // namespace flash_attention::plan
