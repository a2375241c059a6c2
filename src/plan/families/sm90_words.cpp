
#include "abi/forward_sm90.h"
#include "plan/families/sm90.h"
#include "plan/masks.h"
#include "plan/program.h"
#include "plan/workspace.h"

namespace flash_attention::plan {

abi::ForwardConfig with_made_words(const Problem& p, const abi::ForwardConfig& config, Plan& plan) {
  // A boolean mask is read once to make its words: nothing else reads bytes as fast, and they take an eighth of its room.
  constexpr std::int64_t fewest_heads = 8;
  const std::int64_t most_bytes = p.mask.present ? 256 << 20 : 32 << 20;
  const std::int64_t blocks =
      (p.seq_q + config.block_q - 1) / config.block_q * ((p.seq_kv + config.block_kv - 1) / config.block_kv);
  const std::int64_t maps = map_heads(p) * map_batches(p), bytes = maps * blocks * config.block_q * config.block_kv / 8;
  // Those of a boolean mask are made for all rows and keys that there are, whatever a sequence uses of them.
  const bool lengths = p.packed || (has_lengths(p) && (!p.mask.present || program_traits(p).visible));
  const bool shared = !lengths && (p.mask.present || (maps == 1 && p.heads_q * p.batch >= fewest_heads));
  if (!abi::forward_sm90_has_mask_words(config) || !shared || bytes > most_bytes) return config;
  reserve(plan, abi::ForwardSm90Region::mask_words, bytes);
  abi::ForwardConfig reader = config;
  abi::Features& features = reader.features;
  features.made_words = true;
  features.hidden_bounds = 0;
  features.mask = features.mask_map = features.block_mask = features.mask_program = false;
  return reader;
}

}  // namespace flash_attention::plan
