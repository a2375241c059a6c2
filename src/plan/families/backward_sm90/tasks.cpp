#include "plan/families/backward_sm90/tasks.h"

#include <algorithm>

#include "support/ceil_div.h"

namespace flash_attention::plan {
bool chooses_steps(const abi::Features& f) { return f.has_mask_data() || f.mask; }

int num_gqa_splits(const Problem& p, const DeviceInfo& device, const abi::BackwardConfig& config) {
  const bool staged = (p.head_dim_v + 31) / 32 <= (p.head_dim + 31) / 32;  // dV leaves by dQ's staging buffer
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
  // Without a mask all tasks are alike: few SMs must be idle in the last round of them.
  if (!causal) return divided_until([&](std::int64_t count) { return count * 100 >= ceil_div(count, sms) * sms * 85; });
  // Under a causal mask the longest tasks have twice the work of the mean. A division costs sums in memory: it begins where
  // it must, and goes on until SMs end together although, for the sake of L2, one head comes after another.
  const int needed = tasks * 10 >= 19 * sms ? 1 : divided_until([&](std::int64_t count) { return count >= 14 * sms; });
  // The heads of a large group, one after another, are more than L2 holds of all that SMs work on: a task has two of them.
  // Where tasks are short, or groups have four heads, the sums cost more (docs/lab/backward_sm90.md).
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
  // The loop that reads the bytes of a boolean mask is scheduled worse with it at 64 columns: random masks of 8192 on an
  // H200 fell from 270 to 248 TFLOP/s; at 128 columns they rose from 415 to 420.
  if (config.features.mask && std::max(p.head_dim, p.head_dim_v) <= 64) return false;
  return chooses_steps(config.features) && config.dq_mode == abi::DqMode::atomic && !config.key_sums && !p.packed &&
         p.head_dim_v <= p.head_dim;
}

}  // namespace flash_attention::plan
