#pragma once

#include "ptx/memory.cuh"
#include "tile/copy.cuh"
#include "tile/score.cuh"
#include "tile/swizzle.cuh"

// Sizes of forward/sm80 that follow from its configuration, its shared memory, and the work tile of a thread block.

namespace flash_attention {

using namespace abi;

template <ForwardConfig config>
struct ForwardSm80Shape {
  static constexpr Features features = config.features;
  static constexpr Type type = features.dtype;
  static constexpr int block_q = config.block_q, block_kv = config.block_kv;
  static constexpr int threads = 32 * config.num_warps;
  static constexpr int dim = tile::round_up(config.head_dim, 16), dim_v = tile::round_up(config.head_dim_v, 16);
  static constexpr int rows_per_warp = block_q / config.num_warps;
  static constexpr int m_tiles = rows_per_warp / 16;
  // Floats are multiplied in two parts each (tile/split.cuh): forward/tf32.
  static constexpr bool split = type == Type::float32;
  static constexpr int q_steps = dim / (split ? 8 : 16);
  static constexpr bool Q_in_registers = !split && m_tiles * q_steps <= 8;  // 32 registers
  // S and O fill 192 registers or more: the row sums, touched once a tile, are kept where they cost none.
  static constexpr bool sums_in_shared = m_tiles * (block_kv + dim_v) / 2 >= 192;
  // A NaN or Inf that some query may not see reaches it through 0 * NaN in P V; such rows are done again. So are those
  // that see an Inf in two parts.
  static constexpr bool repairs_rows = tile::Score<features>::hides || features.dropout || split;
  // What dropout keeps may be far below a row's maximum, and is scaled up at the end: float16 uses all of its range for it.
  static constexpr int log2_P_scale = features.dropout && type == Type::float16 ? 15 : 0;
  using Element = ptx::Element<type>;
  static constexpr int head_dim = config.head_dim, head_dim_v = config.head_dim_v;
  static_assert(block_kv % 16 == 0 && rows_per_warp % 16 == 0 && m_tiles <= 2);

  static constexpr int halves = sizeof(Element) / 2;  // columns of a tile that an element takes
  using QTile = tile::SwizzledTile<block_q, halves * dim>;
  using OTile = tile::SwizzledTile<block_q, halves * dim_v>;
  using KTile = tile::SwizzledTile<block_kv, halves * dim>;
  using VTile = tile::SwizzledTile<block_kv, halves * dim_v>;

  struct SharedStorage {
    union {
      QTile Q;
      OTile O;  // a warp writes the rows whose queries it alone has read, before the last tile's second barrier
    };
    KTile K;
    VTile V;
    float sums[sums_in_shared ? 2 * m_tiles : 1][sums_in_shared ? threads : 1];  // each thread its own
  };

  __device__ __forceinline__ static tile::BlockCoordinates block_of(const AttentionArgs& args, int block_idx) {
    const int num_tiles = tile::ceil_div(args.seq_q, block_q);
    return tile::query_block(tile::by_work<features>(block_idx, gridDim.x, num_tiles, args.seq_kv), num_tiles,
                             args.heads_q);
  }
};

}  // namespace flash_attention
