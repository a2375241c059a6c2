#include "abi/forward_sm90.h"
#include "plan/families/sm90.h"
#include "plan/masks.h"
#include "plan/program.h"
#include "plan/workspace.h"

namespace flash_attention::plan {
namespace {

/// Of all maps.
std::int64_t word_bytes(const Problem& p, const abi::ForwardConfig& config) {
  const std::int64_t blocks =
      (p.seq_q + config.block_q - 1) / config.block_q * ((p.seq_kv + config.block_kv - 1) / config.block_kv);
  return map_heads(p) * map_batches(p) * blocks * config.block_q * config.block_kv / 8;
}

/// The kernel that reads the words: it knows no mask by itself.
abi::ForwardConfig reader_of(abi::ForwardConfig config) {
  abi::Features& features = config.features;
  features.made_words = true;
  features.hidden_bounds = 0;
  features.mask = features.mask_map = features.block_mask = features.mask_program = false;
  return config;
}

}  // namespace

bool has_made_words(const Problem& p, const abi::ForwardConfig& config) {
  // A boolean mask is read once to make its words: nothing else reads bytes as fast, and they take an eighth of its room.
  constexpr std::int64_t fewest_heads = 8;
  const std::int64_t most_bytes = p.mask.present ? 256 << 20 : 32 << 20;
  // Those of a boolean mask are made for all rows and keys that there are, whatever a sequence uses of them.
  const bool lengths = p.packed || (has_lengths(p) && (!p.mask.present || program_traits(p).visible));
  const bool one_map = map_heads(p) * map_batches(p) == 1;
  const bool shared = !lengths && (p.mask.present || (one_map && p.heads_q * p.batch >= fewest_heads));
  abi::ForwardConfig itself = config;
  itself.block_q = 128;  // the kernel could make words by itself: then they are worth it
  return shared && abi::forward_sm90_has_mask_words(itself) && abi::forward_sm90_has_mask_words(reader_of(config)) &&
         word_bytes(p, config) <= most_bytes;
}

abi::ForwardConfig with_made_words(const Problem& p, const abi::ForwardConfig& config, Plan& plan) {
  if (!has_made_words(p, config)) return config;
  reserve(plan, abi::ForwardSm90Region::mask_words, word_bytes(p, config));
  return reader_of(config);
}

}  // namespace flash_attention::plan
