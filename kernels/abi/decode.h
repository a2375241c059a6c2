#pragma once

// How decode/sm80 fills its shared memory and its workspace. The planner reserves what these functions return, and the
// kernel uses it. Plain constexpr arithmetic on a configuration, the same on host and device.

#include "abi/config.h"

namespace flash_attention::abi {

/// The scales (int4: and zeros) of a tile's groups in shared memory, as numbers of 16 bits: a row for each key.
struct DecodeGroups {
  int numbers = 0;  // of a group: 1, or 2 with zeros; 0: there are no groups
  int of_k = 0;     // groups of a row
  int of_v = 0;
  int key_bytes = 0;  // of a key's row of scales, or of zeros
  int value_bytes = 0;
  int key_zeros = 0;  // where rows begin: K's scales at 0, its zeros, V's scales, its zeros
  int values = 0;
  int value_zeros = 0;
  int bytes = 0;  // of a stage

  constexpr explicit DecodeGroups(const ForwardConfig& config) {
    if (!has_groups(key_type(config.features))) return;
    numbers = config.features.kv_dtype == Type::int4 ? 2 : 1;
    of_k = config.head_dim / config.features.kv_group;
    of_v = config.head_dim_v / config.features.kv_group;
    key_bytes = of_k * 2;
    value_bytes = of_v * 2;
    key_zeros = config.block_kv * key_bytes;
    values = numbers * key_zeros;
    value_zeros = values + config.block_kv * value_bytes;
    bytes = values + numbers * config.block_kv * value_bytes;
  }
};

/// The most parts of an item, if each block of the grid that shares it has one: those that 132 SMs run at a time.
constexpr int decode_max_blocks(const Features& features) { return has_groups(key_type(features)) ? 5 * 132 : 512; }

/// Factors of parts that a warp keeps in shared memory. In the fixed order it keeps factors of 32 parts in registers
/// instead.
constexpr int decode_max_factors(const ForwardConfig& config) {
  return has_fixed_order(config) ? 1 : decode_max_blocks(config.features);
}

/// A tile has block_q rows of a key head: query token t of the head's query head g is row t * group + g. A warp of
/// tensor cores has 16 rows; if block_q is smaller, the rest of its tile is empty.
struct DecodeLayout {
  int row_warps;      // warps side by side along the rows
  int column_warps;   // warps along the columns of O: wide heads do not fit in the registers of one warp
  int key_warps;      // warps along the keys: each has its own running maximum
  int tile_warps;     // of key_warps, those that share a tile; the others have the next tile
  int warp_rows;      // rows of a warp that can exist
  int merge_columns;  // columns of O that the warps exchange at a time
  int stage_bytes;    // a tile of K and one of V, or of both, and the scales of their rows
  int q_bytes;
  int merge_bytes;
  int order_bytes;  // memory that warps exchange within a tile, if the order of sums is fixed
  int shared_bytes;

  static constexpr int panels(int columns) { return (columns + 63) / 64; }  // tile::SwizzledTile
  /// Columns of K or V in 16 bits.
  static constexpr int packed_columns(const ForwardConfig& config) {
    return has_groups(key_type(config.features)) ? 4 : is_narrow(key_type(config.features)) ? 2 : 1;
  }
  /// Columns of a row of K or V as the products take them: steps of 16, two at a time if elements have 8 bits, four if
  /// they have 4.
  static constexpr int columns_of(const ForwardConfig& config, int dim) {
    const int unit = 16 * packed_columns(config);
    return (dim + unit - 1) / unit * unit;
  }
  /// The same in units of 16 bits, in which shared memory is counted.
  static constexpr int stored_columns(const ForwardConfig& config, int dim) {
    return columns_of(config, dim) / packed_columns(config);
  }
  static constexpr int min(int a, int b) { return a < b ? a : b; }
  static constexpr int max(int a, int b) { return a < b ? b : a; }
  /// In the fixed order: columns of a row that is exchanged. All columns are exchanged together.
  static constexpr int columns_in_order(const ForwardConfig& config) { return panels(config.head_dim_v) * 64; }

  static constexpr bool splits_columns(const ForwardConfig& config) { return config.head_dim_v > 256; }
  /// Columns of O of a warp. If two warps share a row, whole panels of V.
  static constexpr int value_columns(const ForwardConfig& config) {
    if (!splits_columns(config)) return columns_of(config, config.head_dim_v);
    const int panel = is_narrow(key_type(config.features)) ? 128 : 64;
    return ((config.head_dim_v + 1) / 2 + panel - 1) / panel * panel;
  }
  /// Columns of a row of V in shared memory, in units of 16 bits.
  static constexpr int stored_value_columns(const ForwardConfig& config) {
    const int all = value_columns(config) * (splits_columns(config) ? 2 : 1);
    return all / packed_columns(config);
  }
  /// Columns of a row of K in shared memory. Latent keys begin with their values, so they have room for the columns of
  /// V, too.
  static constexpr int stored_key_columns(const ForwardConfig& config) {
    const int own = stored_columns(config, config.head_dim), values = stored_value_columns(config);
    return config.features.latent && values > own ? values : own;
  }
  static constexpr int stage_panels(const ForwardConfig& config) {
    return panels(stored_key_columns(config)) + (config.features.latent ? 0 : panels(stored_value_columns(config)));
  }
  /// Columns of O that the warps exchange at a time, in memory for 64 columns of each warp. Warps that share rows write
  /// one after the other.
  static constexpr int exchanged_columns(const ForwardConfig& config, int warp_rows) {
    if (splits_columns(config)) return value_columns(config) % 128 == 0 ? 128 : 64;
    const bool room = warp_rows == 8 && !config.producer_warp && !has_groups(key_type(config.features));
    return min(panels(config.head_dim_v) * 64, room ? 128 : 64);
  }

  constexpr explicit DecodeLayout(const ForwardConfig& config)
      : row_warps(config.block_q <= 16 ? 1 : config.block_q / 16),
        column_warps(splits_columns(config) ? 2 : 1),
        key_warps(config.num_warps / row_warps / column_warps),
        tile_warps(key_warps / config.key_groups),
        warp_rows(min(config.block_q, 16)),
        merge_columns(exchanged_columns(config, warp_rows)),
        stage_bytes((has_groups(key_type(config.features)) ? config.block_kv * (config.head_dim + config.head_dim_v) / 2
                                                           : config.block_kv * 128 * stage_panels(config)) +
                    (config.features.token_scales ? config.block_kv * 8 : 0) + DecodeGroups(config).bytes),
        q_bytes(has_groups(key_type(config.features)) ? (config.block_q <= 8 ? 8 : 16) * 2 * config.head_dim
                                                      : row_warps * 16 * 128 * panels(config.head_dim)),
        merge_bytes(has_fixed_order(config)
                        ? 16 * (columns_in_order(config) + 4) * 4  // 4: so that rows begin in different banks
                        : max(config.num_warps * warp_rows * ((column_warps > 1 ? 64 : merge_columns) + 4) * 4,
                              config.num_warps * decode_max_factors(config) * 4)),
        // Of two tiles, for each 16 keys, P as an operand and its sums; for each warp, maxima of 16 rows; references.
        order_bytes(has_fixed_order(config) ? config.block_kv / 8 * (512 + 256) + config.num_warps * 64 + 128 : 0),
        shared_bytes(config.num_stages * stage_bytes + q_bytes + (merge_bytes + order_bytes + 1023) / 1024 * 1024 +
                     (DecodeGroups(config).bytes != 0 ? 1024 : 0) +  // their end in a struct of whole 1024 bytes
                     2048) {}                                        // statistics and a flag
};

/// Whether all items have the same tiles of keys, so that the host knows them, too.
constexpr bool decode_items_are_alike(const Features& features) {
  if (features.key_list) return !features.packed;  // as many as a list has entries
  return !features.packed && !features.seqused_q && !features.seqused_kv && !features.key_lengths &&
         !features.left_padding && !features.window_left && !features.window_right;
}

/// Blocks of four warps on an SM with 4-bit keys. Four hold 128 registers a thread; where items have lengths, or several
/// blocks, 76 to 330 bytes are spilled, and yet 64 x 32/8 x 4096 in pages of 64 takes 144 us; with three and no spills 197
/// (H200, nvfp4).
constexpr int decode_group_blocks(const ForwardConfig& config) {
  return config.block_q > 8 || config.head_dim > 128 || config.head_dim_v > 128 ? 2 : 4;
}

/// Blocks that an SM runs at the same time. With 4 bits most instructions make numbers of codes, and many warps hide how
/// long each takes.
constexpr int decode_blocks_per_sm(const ForwardConfig& config, int shared_limit) {
  if (has_groups(key_type(config.features))) {
    constexpr int reserved = 1024;  // of each block
    const int fit = (shared_limit + reserved) / (DecodeLayout(config).shared_bytes + reserved);
    return fit < 1 ? 1 : fit < decode_group_blocks(config) ? fit : decode_group_blocks(config);
  }
  return config.num_warps <= 4 && 2 * DecodeLayout(config).shared_bytes <= shared_limit ? 2 : 1;
}

/// Whether the blocks of an item form a cluster, which merges the item's parts in shared memory.
constexpr bool decode_has_clusters(const ForwardConfig& config) { return config.item_blocks > 1 && config.producer_warp; }

/// decode/sm90: a whole warpgroup loads, though one warp would be enough. Registers are allotted by quarters of an SM,
/// so nine warps take as many as twelve, and only a whole warpgroup can pass its registers to the consumers.
constexpr int decode_producer_threads = 128;
constexpr int decode_threads(const ForwardConfig& config) {
  return 32 * config.num_warps + (config.producer_warp ? decode_producer_threads : 0);
}

/// Registers of a thread after the producers have given up theirs; 0 if no registers are moved.
struct DecodeRegisters {
  int producer = 0;
  int consumer = 0;

  constexpr DecodeRegisters(const ForwardConfig& config, int blocks_per_sm) {
    const int threads = decode_threads(config) * blocks_per_sm, at_launch = 65536 / threads / 8 * 8;
    if (at_launch >= 240) return;
    producer = 40;
    consumer = (at_launch + (at_launch - producer) * decode_producer_threads / (32 * config.num_warps)) / 8 * 8;
    consumer = consumer < 240 ? consumer : 240;
  }
};

/// The most splits of an item, if they are fixed.
constexpr long long decode_splits(const ForwardConfig& config, long long seq_kv) {
  const long long keys = static_cast<long long>(config.split_tiles) * config.block_kv;
  return (seq_kv + keys - 1) / keys;
}

/// Bytes of a part of an item's result: block_q rows (with fixed splits, as many rows as can exist) of head_dim_v
/// floats and two statistics.
constexpr long long decode_part_bytes(const ForwardConfig& config, int rows) {
  return static_cast<long long>(rows) * (config.head_dim_v + 2) * 4;
}

}  // namespace flash_attention::abi
