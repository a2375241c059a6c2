#include "abi/forward_sm90.h"
#include "abi/tile_map.h"
#include "plan/families/sm90.h"
#include "plan/features.h"
#include "plan/workspace.h"

namespace flash_attention::plan {
namespace {

// With this many heads, words are made once for all heads. A boolean mask always gets words: its bytes are read once to
// make them. Nothing else reads bytes as fast, and words take an eighth of the memory.
constexpr std::int64_t fewest_heads = 8;
std::int64_t most_word_bytes(const abi::Features& f) { return f.mask ? 256 << 20 : 32 << 20; }

/// Whether many heads share their words, or the words are those of a boolean mask.
bool are_worth_making(const Problem& p, const abi::Features& f) {
  return f.mask || (map_heads(p) * map_batches(p) == 1 && p.heads_q * p.batch >= fewest_heads);
}

/// Bytes of the words of all maps.
std::int64_t word_bytes(const Problem& p, const abi::ForwardConfig& config) {
  const std::int64_t blocks =
      (p.seq_q + config.block_q - 1) / config.block_q * ((p.seq_kv + config.block_kv - 1) / config.block_kv);
  return map_heads(p) * map_batches(p) * blocks * config.block_q * config.block_kv / 8;
}

/// The configuration of the kernel that reads the words. It has no mask itself.
abi::ForwardConfig reader_of(abi::ForwardConfig config) {
  abi::Features& features = config.features;
  features.precomputed_mask_bits = true;
  features.hidden_bounds = 0;
  features.mask = features.mask_map = features.block_mask = features.mask_program = false;
  config.loop.mask_words = choose_mask_words(config);
  return config;
}

}  // namespace

std::int64_t step_word_bytes(const Problem& p) {
  const auto tiles = [](std::int64_t rows) { return (rows + abi::mask_unit - 1) / abi::mask_unit; };
  return map_heads(p) * map_batches(p) * tiles(p.seq_q) * tiles(p.seq_kv) * abi::mask_bits_threads * 4;
}

bool has_mask_bits(const Problem& p, const abi::BackwardConfig& config) {
  const bool two_warpgroups = config.block_kv == 2 * abi::mask_unit && config.num_warps == 12;
  if (!two_warpgroups || config.dq_mode != abi::DqMode::atomic || p.packed) return false;
  const abi::Features& f = config.features;
  return (f.mask || f.mask_program) && are_worth_making(p, f) && step_word_bytes(p) <= most_word_bytes(f);
}

bool has_precomputed_mask_bits(const Problem& p, const abi::ForwardConfig& config) {
  // The words of a boolean mask are made for all rows and keys, even if a sequence uses fewer.
  const abi::Features& f = config.features;
  const bool lengths = f.packed || (f.has_lengths() && (!f.mask || f.mask_program));
  abi::ForwardConfig itself = config;
  itself.block_q = 128;  // the kernel could make words itself: then they are worth it
  return !lengths && are_worth_making(p, f) && choose_mask_words(itself) != abi::MaskWords::none &&
         choose_mask_words(reader_of(config)) != abi::MaskWords::none && word_bytes(p, config) <= most_word_bytes(f);
}

abi::ForwardConfig with_precomputed_mask_bits(const Problem& p, const abi::ForwardConfig& config, Plan& plan) {
  if (!has_precomputed_mask_bits(p, config)) return config;
  reserve(plan, abi::ForwardSm90Region::mask_words, word_bytes(p, config));
  return reader_of(config);
}

}  // namespace flash_attention::plan
