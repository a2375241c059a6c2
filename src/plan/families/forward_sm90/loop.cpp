// How forward/sm90 uses its registers. docs/lab/forward_sm90.md and docs/lab/masks.md have the measurements.
#include "abi/forward_sm90.h"
#include "plan/families/sm90.h"

namespace flash_attention::plan {
namespace {

bool is_wide(const abi::ForwardConfig& config) { return abi::forward_sm90_is_wide(config.head_dim, config.head_dim_v); }

/// Whether keys before the first visible one are hidden, by a window or as padding.
bool has_left_edge(const abi::Features& f) { return f.window_left || f.left_padding; }

/// Whether the kernel only reads words of masks, or of lists, and does nothing else to scores.
bool reads_words_alone(const abi::Features& f) {
  return (f.precomputed_mask_bits || f.list_bits != 0) && !f.modifies_scores() && !f.dropout;
}

/// Q stays in registers if all of it fits in addition to S, P and O. If it were read from shared memory for every
/// block, it would be a quarter of the products' reads, which nearly use up the bandwidth of shared memory.
bool holds_queries(const abi::ForwardConfig& config) {
  const int width_v = (config.head_dim_v + 31) / 32 * 32, steps = (config.head_dim + 15) / 16;
  const int free = abi::forward_sm90_registers(config).attend - (config.block_kv * 3 / 4 + width_v / 2 + 4 * steps);
  if (is_wide(config)) return false;
  return reads_words_alone(config.features) ? free >= 32 : !config.features.touches_scores() && free >= 40;
}

/// With a wide O the products of a block take so long that the warpgroups need no order. Under a window a tile ends
/// before an order pays.
bool has_pingpong(const abi::ForwardConfig& config) {
  return abi::forward_sm90_warpgroups(config) > 1 && !is_wide(config) && config.head_dim_v <= 128 &&
         !(config.features.window_left && config.head_dim_v > 64);
}

/// If a branch differs between lanes, all numbers after it leave the uniform registers, and wgmma needs its descriptors
/// there. A vote keeps the lanes together. It needs registers that some configurations do not have: these shuffle
/// instead.
bool is_uniform_by_vote(const abi::ForwardConfig& config) {
  const abi::Features& f = config.features;
  if (abi::forward_sm90_is_crowded(config)) return false;
  if (!f.touches_scores() || (config.head_dim <= 128 && config.head_dim_v <= 128)) return true;
  const bool loads_biases = f.bias && config.bias_stages == 0, listed = f.has_tile_map() && !reads_words_alone(f);
  return !loads_biases && !f.mask && !f.score_program && !listed;
}

}  // namespace

/// With ALiBi, and perhaps with a program, the nearest keys weigh most, so they must come first and give the reference.
/// So they must with a left edge: its blocks are then tested after the interior, on one side only.
abi::KeyOrder choose_key_order(const abi::ForwardConfig& config) {
  const abi::Features& f = config.features;
  if (abi::has_fixed_order(config)) return abi::KeyOrder::forwards;
  if (!f.alibi && !has_left_edge(f) && !f.score_program) return abi::KeyOrder::forwards;
  const bool seen_both_ways = f.alibi && !f.window_right && !has_left_edge(f) && !f.has_tile_map() && !is_wide(config) &&
                              !f.score_program && !is_narrow(key_type(f));
  return seen_both_ways ? abi::KeyOrder::from_diagonal : abi::KeyOrder::backwards;
}

/// Masks that choose tiles are read as words of bits. But if blocks, or hidden rows of two numbers a key, are the only
/// mask, the warpgroups test them.
abi::MaskWords choose_mask_words(const abi::ForwardConfig& config) {
  const abi::Features& f = config.features;
  const bool spills = f.softcap && f.bias && f.alibi && f.dropout;  // with words, 8 bytes at head_dim 128
  const bool from_rows = f.hidden_bounds == 1 || f.hidden_bounds == 4;
  // one warpgroup alone makes no words
  const bool rows = config.block_q == 128 || (config.block_q == 64 && f.precomputed_mask_bits);
  if (!(f.mask_program || f.mask_map || f.precomputed_mask_bits || from_rows) || !rows || is_wide(config) || spills)
    return abi::MaskWords::none;
  return f.precomputed_mask_bits ? abi::MaskWords::given : abi::MaskWords::own;
}

abi::ForwardLoop choose_loop(const abi::ForwardConfig& given) {
  abi::ForwardConfig config = given;
  config.loop.mask_words = choose_mask_words(config);  // registers depend on it
  const abi::Features& f = config.features;
  return {.key_order = choose_key_order(config),
          .mask_words = config.loop.mask_words,
          .pingpong = has_pingpong(config),
          .holds_queries = holds_queries(config),
          .uniform_by_vote = is_uniform_by_vote(config),
          // Each copy of a program of scores takes long to compile.
          .keeps_tested = (config.loop.mask_words != abi::MaskWords::none || f.list_bits != 0) && !f.score_program,
          // With options a warpgroup has no registers to skip blocks; with bytes a random mask lost 6 to 22 %.
          .skips_listed = !f.modifies_scores() && !f.dropout && !f.mask};
}

}  // namespace flash_attention::plan
