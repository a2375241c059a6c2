#pragma once

// Sizes of a decode kernel that follow from its configuration, and the layout of its shared memory.

#include "decode/finish.cuh"
#include "decode/ordered.cuh"
#include "decode/tiles.cuh"
#include "ptx/mbarrier.cuh"

namespace flash_attention::decode {

template <ForwardConfig config>
struct ConsumerShape {
  static constexpr Features features = config.features;
  static constexpr Type type = features.dtype;
  static constexpr DecodeLayout layout{config};
  static constexpr int block_kv = config.block_kv, stages = config.num_stages, threads = 32 * config.num_warps;
  static constexpr int warp_keys = block_kv / layout.tile_warps;
  using Finish = decode::Finish<config>;
  using Element = ptx::Element<type>;
  using KTile = typename DecodeTiles<config>::K;
  using VTile = typename DecodeTiles<config>::V;
  static constexpr int dim = DecodeLayout::columns_of(config, config.head_dim);
  static constexpr int dim_v = DecodeLayout::value_columns(config);  // of a warp
  static constexpr int own_columns = has_fixed_order(config) ? Order<config>::own_columns : dim_v;  // of O, of a warp
  static constexpr Type code = key_type(features);
  static constexpr bool narrow = is_narrow(code), grouped = has_groups(code);
  static constexpr int q_steps = dim / 16;
  static constexpr bool Q_in_registers = q_steps <= 8 && layout.row_warps == 1 && !grouped;
  using QTile = typename DecodeTiles<config>::Q;
  static_assert(type != Type::float32 && !features.dropout && warp_keys % 16 == 0 && stages >= (grouped ? 1 : 2));
  static_assert(layout.tile_warps * config.key_groups * layout.row_warps * layout.column_warps == config.num_warps);
  static_assert(config.key_groups == 1 || (layout.row_warps == 1 && layout.column_warps == 1));
  static_assert(!has_fixed_order(config) ||
                (config.key_groups == 1 && config.block_q == 16 && layout.column_warps == 1 && !features.latent));

  struct SharedStorage {
    using Stage = DecodeStage<config>;
    Stage stage[stages];
    QTile Q;
    typename FinishRows<config>::SharedStorage finish;
    [[no_unique_address]] typename Order<config>::Storage order;
    // State that is the same for all threads and rarely read. It is here to save registers.
    Cursor<config> loading[config.producer_warp ? 1 : config.num_warps];  // decode/sm80.cuh: the tile to load next
    Cursor<config> taking[grouped ? config.num_warps : 1];                // with 4-bit keys: the item that begins next
    Item<config> item;                                                    // the current item
    tile::Sequence sequence;
    tile::KeyRange full;  // the keys that all rows of the item see
    struct Barriers {
      ptx::Mbarrier K_full[stages], K_empty[stages], V_full[stages], V_empty[stages];
    } barriers;  // only decode/sm90.cuh uses them
    alignas(16) float scales[features.token_scales ? stages : 1][features.token_scales ? 2 * block_kv : 4];
    alignas(16) unsigned char groups[grouped ? stages : 1][grouped ? DecodeGroups(config).bytes : 16];
    unsigned listed[features.key_list ? stages : 1][4];  // a bit for each entry of a tile that is a key
  };
  static_assert(sizeof(SharedStorage) <= layout.shared_bytes);
  static_assert(!ClusterMerge<config>::in_cluster ||
                ClusterMerge<config>::received_bytes <= static_cast<int>(sizeof(SharedStorage::stage)));
};

}  // namespace flash_attention::decode
