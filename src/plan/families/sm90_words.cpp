#include "abi/forward_sm90.h"
#include "plan/families/sm90.h"
#include "plan/masks.h"
#include "plan/workspace.h"

namespace flash_attention::plan {

abi::ForwardConfig with_made_words(const Problem& p, const abi::ForwardConfig& config, Plan& plan) {
  constexpr std::int64_t most_bytes = 32 << 20, fewest_heads = 8;
  const std::int64_t blocks =
      (p.seq_q + config.block_q - 1) / config.block_q * ((p.seq_kv + config.block_kv - 1) / config.block_kv);
  const std::int64_t bytes = blocks * config.block_q * config.block_kv / 8;
  const bool lengths = p.packed || p.seqused_q || p.seqused_kv || p.key_lengths || p.left_padding;
  // The bytes of a boolean mask are read by the kernel: made before, its words take longer than that saves.
  const bool shared = map_heads(p) == 1 && map_batches(p) == 1 && !lengths && !p.mask.present;
  if (!abi::forward_sm90_has_mask_words(config) || !shared) return config;
  if (p.heads_q * p.batch < fewest_heads || bytes > most_bytes) return config;
  reserve(plan, abi::ForwardSm90Region::mask_words, bytes);
  abi::ForwardConfig reader = config;
  abi::Features& features = reader.features;
  features.made_words = true;
  features.hidden_bounds = 0;
  features.mask = features.mask_map = features.block_mask = features.mask_program = false;
  return reader;
}

}  // namespace flash_attention::plan
