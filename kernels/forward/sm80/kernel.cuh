#pragma once

// Attention forward with mma.sync and cp.async: sm_80 and up, 16-bit types, the whole contract.
//
// A thread block processes one work tile: block_q queries of one head, 16 or 32 rows a warp. It visits the KV blocks from
// the last to the first. K and V have one buffer each: V arrives while Q K^T is computed, and the next K while P V is
// computed. Each iteration has two barriers, because a buffer is shared by all warps: one before K (and the end of the
// previous V), one before V (and the end of K). A warp's registers hold S and O, and Q if it has at most 32 registers.
//
//   Q -> shared memory (-> registers if it fits); prefetch K of the last block
//   for each KV block:
//     wait for K;  prefetch V;       S = Q K^T             registers    multiply_keys
//     wait for V;  prefetch next K;  P = softmax step      registers    score_tile, tile/softmax.cuh
//                                    O = O * rescale + P V  registers    add_values
//   O / sum -> shared -> global, 16 bytes per lane;  lse                finish
//
// O of 16 rows and more than 256 columns does not fit in a warp's registers: then two warps have the same rows, both
// compute S, and each has half of O's columns (column_warps).

#include "abi/forward_sm80.h"
#include "forward/repair.cuh"
#include "forward/sm80/loads.cuh"
#include "ptx/memory.cuh"
#include "ptx/path.cuh"
#include "ptx/registers.cuh"
#include "ptx/shared.cuh"
#include "tile/copy.cuh"
#include "tile/dropout.cuh"
#include "tile/fma_product.cuh"
#include "tile/largest_score.cuh"
#include "tile/mma.cuh"
#include "tile/score.cuh"
#include "tile/softmax.cuh"
#include "tile/swizzle.cuh"
#include "tile/tail.cuh"

namespace flash_attention {

using namespace abi;

template <ForwardConfig config>
struct ForwardSm80Shape {
  static constexpr Features features = config.features;
  static constexpr Type type = features.dtype;
  static constexpr int block_q = config.block_q, block_kv = config.block_kv;
  static constexpr int threads = 32 * config.num_warps;
  // forward/sm89_fp8: Q, K and V are codes of 8 bits, of which a product contracts 32; O has 16 bits.
  static constexpr bool codes = features.narrow_queries;
  static constexpr int dim = tile::round_up(config.head_dim, codes ? 32 : 16);
  static constexpr int column_warps = forward_sm80_column_warps(config.head_dim_v);
  static constexpr int v_columns = forward_sm80_value_columns(config.head_dim_v);  // of a tile
  static constexpr int dim_v = v_columns / column_warps;                           // of a warp
  static constexpr int row_warps = config.num_warps / column_warps, rows_per_warp = block_q / row_warps;
  static constexpr int m_tiles = rows_per_warp / 16;
  static constexpr bool floats = type == Type::float32;
  // forward/tf32: floats are split in two parts each for the products (tile/split.cuh).
  static constexpr bool split = floats && !features.fp32_products;
  static constexpr int q_steps = dim / (floats ? 8 : codes ? 32 : 16);
  // 32 registers. Codes leave 16: their P, and sums of a block, are beside O.
  static constexpr bool Q_in_registers = !floats && m_tiles * q_steps <= (codes ? 4 : 8);
  // If S and O fill 192 registers or more, the row sums are in shared memory: they are used only once a tile.
  static constexpr bool sums_in_shared = (!floats || split) && m_tiles * (block_kv + dim_v) / 2 >= 192;
  // A NaN or Inf in V reaches queries that do not see it through 0 * NaN in P V. Such rows are computed again (repair). So
  // are rows that see an Inf which was split in two parts, or whose probability is 0 as a code.
  static constexpr bool repairs_rows = tile::Visibility<features>::hides || features.dropout || split || codes;
  // A float below 2^-112 loses bits when it is split in two parts; nothing below 2^-136 is kept. A row of O whose elements
  // are all below this limit is computed again, too.
  static constexpr float tiny_row = 0x1p-100f;
  // A probability that dropout keeps may be far below the row's maximum, and is scaled up at the end. In float16 it is
  // therefore scaled by this factor, to use the whole range.
  // As a code of e4m3, whose largest number is 448, it is scaled by 2^8.
  static constexpr int log2_P_scale = codes ? 8 : features.dropout && type == Type::float16 ? 15 : 0;
  using Element = ptx::Element<type>;
  using Query = tile::Stored<query_type(features)>;
  using Key = tile::Stored<key_type(features)>;
  static constexpr int head_dim = config.head_dim, head_dim_v = config.head_dim_v;
  static_assert(block_kv % 16 == 0 && rows_per_warp % 16 == 0 && m_tiles <= 2);

  static constexpr int key_bytes = sizeof(Key), element_bytes = sizeof(Element);
  using QTile = tile::SwizzledTile<block_q, key_bytes * dim / 2>;  // columns of 16 bits
  using OTile = tile::SwizzledTile<block_q, element_bytes * v_columns / 2>;
  using KTile = tile::SwizzledTile<block_kv, key_bytes * dim / 2>;
  using VTile = tile::SwizzledTile<block_kv, key_bytes * v_columns / 2>;
  // O is over Q: a warp writes only rows of which it alone has read the queries, or waits for the other. O of codes is
  // larger: it is over K and V, too, and what they lack is behind them.
  static constexpr int output_bytes = sizeof(OTile), operand_bytes = sizeof(QTile) + sizeof(KTile) + sizeof(VTile);
  static constexpr int lacking_bytes = codes ? tile::max(output_bytes - operand_bytes, 1) : 1;

  struct SharedStorage {
    union {
      QTile Q;
      unsigned char O[codes ? sizeof(QTile) : sizeof(OTile)];
    };
    KTile K;
    VTile V;
    union {
      float sums[sums_in_shared ? 2 * m_tiles : 1][sums_in_shared ? threads : 1];  // one place for each thread
      bool unsound[2][column_warps > 1 ? row_warps : 1];                           // of each warp: some of O is not finite
      unsigned char rest_of_O[lacking_bytes];
    };
  };
  static_assert(column_warps == 1 || !(sums_in_shared || codes));

  __device__ __forceinline__ static tile::BlockCoordinates block_of(const AttentionArgs& args, int block_idx) {
    const int num_tiles = tile::ceil_div(args.seq_q, block_q);
    return tile::query_block(tile::by_work<features>(block_idx, gridDim.x, num_tiles, args.seq_kv), num_tiles,
                             args.heads_q);
  }
};

template <ForwardConfig config>
struct ForwardSm80 {
  using Shape = ForwardSm80Shape<config>;
  using Element = typename Shape::Element;
  using Query = typename Shape::Query;
  using Key = typename Shape::Key;
  using QTile = typename Shape::QTile;
  using OTile = typename Shape::OTile;
  using KTile = typename Shape::KTile;
  using VTile = typename Shape::VTile;
  using SharedStorage = typename Shape::SharedStorage;
  static constexpr Features features = config.features;
  static constexpr Type type = features.dtype;
  static constexpr int head_dim = config.head_dim, head_dim_v = config.head_dim_v;
  static constexpr int block_q = config.block_q, block_kv = config.block_kv, threads = Shape::threads;
  static constexpr int dim_v = Shape::dim_v, rows_per_warp = Shape::rows_per_warp, m_tiles = Shape::m_tiles;
  static constexpr int q_steps = Shape::q_steps, log2_P_scale = Shape::log2_P_scale;
  static constexpr bool floats = Shape::floats, split = Shape::split, codes = Shape::codes;
  static constexpr bool Q_in_registers = Shape::Q_in_registers;
  static constexpr bool sums_in_shared = Shape::sums_in_shared, repairs_rows = Shape::repairs_rows;
  static constexpr int column_warps = Shape::column_warps;
  using Scores = float[m_tiles][block_kv / 8][4];

  const AttentionArgs& args;
  SharedStorage& storage;
  const tile::Sequence sequence;
  const int head_idx, q_begin;
  const int thread = threadIdx.x, lane = threadIdx.x % 32;
  const int warp_row = static_cast<int>(threadIdx.x) / 32 % Shape::row_warps * rows_per_warp;
  const int column_warp = column_warps == 1 ? 0 : static_cast<int>(threadIdx.x) / 32 / Shape::row_warps;
  const tile::LanePlace place{lane};
  const tile::Score<features> score;
  const unsigned Q_smem = ptx::shared_address(&storage.Q), K_smem = ptx::shared_address(&storage.K),
                 V_smem = ptx::shared_address(&storage.V);

  unsigned Q[Q_in_registers ? m_tiles : 1][Q_in_registers ? q_steps : 1][4];
  float O[m_tiles][dim_v / 8][4]{};
  tile::RowState rows[m_tiles];
  tile::RowStatistics<false, features.entropy> statistics[m_tiles];  // the largest score is the running maximum

  __device__ __forceinline__ ForwardSm80(const AttentionArgs& arguments, SharedStorage& shared, const tile::Sequence& s,
                                         int head, int first_query)
      : args(arguments), storage(shared), sequence(s), head_idx(head), q_begin(first_query), score(arguments, s, head) {}

  __device__ __forceinline__ tile::Rows<const Key> keys(const TensorView& view) const {
    auto result = tile::key_rows<const Key, features>(view, sequence, head_idx / args.group);
    result.count = sequence.visible_kv;
    return result;
  }

  __device__ __forceinline__ void load_Q() {
    const auto from = tile::query_rows<const Query, features>(args.Q, sequence, head_idx).from(q_begin);
    tile::copy_tile_async<threads, config.head_dim, QTile>(Q_smem, from, thread);
    ptx::copy_async_commit();
  }
  /// The next tile to visit: tile_idx, or the nearest before it of which the masks show something; or tiles.begin - 1.
  __device__ __forceinline__ int tile_below(int tile_idx, const tile::TileRange& tiles,
                                            tile::VisibleTiles& visible_tiles) const {
    if constexpr (!tile::Visibility<features>::skips_tiles) return tile_idx;
    return visible_tiles.previous(tile_idx, tiles.begin, [&](int other) {
      return other >= tiles.begin && other < tiles.end &&
             !score.sight.template masks_hide<block_q, block_kv>(q_begin, other * block_kv);
    });
  }

  __device__ __forceinline__ void read_Q(unsigned (&A)[4], int m, int step) const {
    ptx::ldmatrix_x4(A, QTile::step(tile::a_address<QTile>(Q_smem, warp_row, lane), 2 * step) + m * 16 * 128);
  }
  __device__ __forceinline__ void keep_Q() {
#pragma unroll
    for (int m = 0; m < m_tiles; ++m) {
#pragma unroll
      for (int step = 0; step < q_steps; ++step) read_Q(Q[m][step], m, step);
    }
  }

  /// S = Q K^T.
  __device__ __forceinline__ void multiply_keys(Scores& S) {
    const unsigned K_address = tile::b_transposed_address<KTile>(K_smem, 0, ptx::hide_from_compiler(lane));
    tile::multiply<key_type(features), q_steps>(
        S,
        [&](unsigned(&A)[4], int m, int step) {
          if constexpr (Q_in_registers) {
#pragma unroll
            for (int e = 0; e < 4; ++e) A[e] = Q[m][step][e];
          } else {
            read_Q(A, m, step);
          }
        },
        [&](unsigned(&B)[4], int n, int step) { ptx::ldmatrix_x4(B, KTile::step(K_address, 2 * step) + n * 16 * 128); });
  }

  /// Turns dot products into scores, -inf if hidden; after the softmax sets dropped probabilities to 0.
  template <bool some_hidden>
  __device__ __forceinline__ void score_tile(Scores& S, int kv_begin) const;
  __device__ __forceinline__ void drop_tile(Scores& P, int kv_begin) const;

  __device__ __forceinline__ void rescale_output(const float (&rescale)[m_tiles][2]) {
#pragma unroll
    for (int m = 0; m < m_tiles; ++m) {
#pragma unroll
      for (int n = 0; n < dim_v / 8; ++n) {
#pragma unroll
        for (int e = 0; e < 4; ++e) O[m][n][e] *= rescale[m][e / 2];
      }
    }
  }
  /// O += P V.
  __device__ __forceinline__ void add_values(const Scores& P) {
    const unsigned V_address = tile::b_address<VTile>(V_smem, 0, ptx::hide_from_compiler(lane)) +
                               column_warp * (VTile::panels / column_warps * VTile::panel_bytes);
    tile::multiply<type, block_kv / 16>(
        O, [&](unsigned(&A)[4], int m, int step) { tile::pack_a<type>(A, P[m][2 * step], P[m][2 * step + 1]); },
        [&](unsigned(&B)[4], int n, int step) {
          ptx::ldmatrix_x4_trans(B, VTile::step(V_address, 2 * n) + step * 16 * 128);
        });
  }

  /// O = O * rescale + P V of codes (forward/sm89_fp8.cuh).
  __device__ __forceinline__ void add_code_values(const Scores& P, const float (&rescale)[m_tiles][2]);

  /// The same two products for floats on tensor cores (tf32.cuh), and on CUDA cores (fp32.cuh), where O is rescaled, too.
  __device__ __forceinline__ void multiply_split_keys(Scores& S) const;
  __device__ __forceinline__ void add_split_values(const Scores& P);
  __device__ __forceinline__ void multiply_float_keys(Scores& S) const;
  __device__ __forceinline__ void add_float_values(const Scores& P, const float (&rescale)[m_tiles][2]);

  __device__ __forceinline__ void read_sums(int m) {
#pragma unroll
    for (int half = 0; half < 2; ++half) rows[m].sum[half] = storage.sums[2 * m + half][thread];
  }
  __device__ __forceinline__ void write_sums(int m) {
#pragma unroll
    for (int half = 0; half < 2; ++half) storage.sums[2 * m + half][thread] = rows[m].sum[half];
  }

  __device__ __forceinline__ void attend(const tile::TileRange& tiles) {
    tile::VisibleTiles visible_tiles;
    int tile_idx = tile_below(tiles.end - 1, tiles, visible_tiles);
    if (tile_idx < tiles.begin) return;  // the masks hide all tiles
    sm80::KeyCopies<ForwardSm80, features.paged> copies(*this, tile_idx * block_kv);
    load_Q();
    copies.template load_K<true>();
    if constexpr (Q_in_registers) {
      ptx::copy_async_wait<1>();
      __syncthreads();  // Q has landed: cp.async waits only for a thread's own copies
      keep_Q();
    }
    if constexpr (sums_in_shared) {
#pragma unroll
      for (int m = 0; m < m_tiles; ++m) write_sums(m);
    }
    const float scale_log2 = score.unit_scale() * tile::log2_e;
#pragma unroll 1
    while (tile_idx >= tiles.begin) {
      const int kv_begin = tile_idx * block_kv, next_idx = tile_below(tile_idx - 1, tiles, visible_tiles);
      const int distance = (next_idx - tile_idx) * block_kv;
      ptx::copy_async_wait<0>();
      __syncthreads();  // K has landed, and every warp is done with the previous V
      copies.load_V(distance, next_idx * block_kv);
      Scores S{};
      if constexpr (split) {
        multiply_split_keys(S);
      } else if constexpr (floats) {
        multiply_float_keys(S);
      } else {
        multiply_keys(S);
      }
      ptx::copy_async_wait<0>();
      __syncthreads();  // V has landed, and every warp is done with K
      copies.move_K(distance);
      if (next_idx >= tiles.begin) copies.template load_K<false>();
      if (!score.sight.template all_visible<block_q, block_kv>(q_begin, kv_begin)) {
        if constexpr (codes) {
          ptx::path<"forward/sm89_fp8 edge tile">();
        } else {
          ptx::path<split ? "forward/tf32 edge tile" : floats ? "forward/fp32 edge tile" : "forward/sm80 edge tile">();
        }
        score_tile<true>(S, kv_begin);
      } else if constexpr (!tile::Score<features>::linear) {
        if constexpr (codes) {
          ptx::path<"forward/sm89_fp8 inner tile with options">();
        } else {
          ptx::path<split    ? "forward/tf32 inner tile with options"
                    : floats ? "forward/fp32 inner tile with options"
                             : "forward/sm80 inner tile with options">();
        }
        score_tile<false>(S, kv_begin);
      }
      float rescale[m_tiles][2];
#pragma unroll
      for (int m = 0; m < m_tiles; ++m) {
        if constexpr (sums_in_shared) read_sums(m);
        rows[m].template update<log2_P_scale, features.bias || features.score_program || floats>(
            S[m], {scale_log2, scale_log2}, rescale[m], statistics[m]);
        if constexpr (sums_in_shared) write_sums(m);
      }
      if constexpr (features.dropout) drop_tile(S, kv_begin);
      if constexpr (floats && !split) {
        add_float_values(S, rescale);
      } else if constexpr (codes) {
        add_code_values(S, rescale);
      } else {
        rescale_output(rescale);
        if constexpr (split) {
          add_split_values(S);
        } else {
          add_values(S);
        }
      }
      tile_idx = next_idx;
    }
    if constexpr (sums_in_shared) {
#pragma unroll
      for (int m = 0; m < m_tiles; ++m) read_sums(m);
    }
  }

  /// A barrier of the warps that have the same rows.
  __device__ __forceinline__ static void sync_rows() {
    if constexpr (column_warps > 1) {
      __syncthreads();
    } else {
      __syncwarp();
    }
  }

  /// Whether this warp has to repair rows: some of O is not finite. Of two that share them the first one does.
  __device__ __forceinline__ bool is_unsound(float check) const {
    if constexpr (column_warps == 1) return ptx::any(check != check);
    const int group = warp_row / rows_per_warp;
    return column_warp == 0 && (storage.unsound[0][group] || storage.unsound[1][group]);
  }

  /// Writes lse, and O through the warp's own rows of shared memory.
  __device__ __forceinline__ void finish();
};
// Scores of forward/sm80 in registers: options and mask between Q K^T and the softmax, dropout after it.

/// Turns dot products into scores; -inf if hidden.
template <ForwardConfig config>
template <bool some_hidden>
__device__ __forceinline__ void ForwardSm80<config>::score_tile(Scores& S, int kv_begin) const {
#pragma unroll
  for (int m = 0; m < m_tiles; ++m) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int i = q_begin + warp_row + 16 * m + place.row + 8 * half;
      const tile::KeyRange range = score.sight.keys_of(i);
      // Even if no score is hidden, rows past the last query may be in the tile. They read the last row's bias and are not
      // stored.
      const int existing = some_hidden ? i : tile::min(i, score.sight.len_q - 1);
#pragma unroll
      for (int n = 0; n < block_kv / 8; ++n) {
#pragma unroll
        for (int e = 2 * half; e < 2 * half + 2; ++e) {
          const int j = kv_begin + 8 * n + place.column + e % 2;
          if (some_hidden && !score.sight.visible(range, i, j)) {
            S[m][n][e] = -tile::infinity;
          } else {
            S[m][n][e] = score.in_units(S[m][n][e], existing, j);
          }
        }
      }
    }
  }
}

/// Sets dropped probabilities to 0. The factor 1 / (1 - p) is applied at the end.
template <ForwardConfig config>
__device__ __forceinline__ void ForwardSm80<config>::drop_tile(Scores& P, int kv_begin) const {
  const tile::Dropout dropout(args, sequence.batch_idx, head_idx);
#pragma unroll
  for (int m = 0; m < m_tiles; ++m) {
    const unsigned row = tile::Dropout::row_counter(q_begin + warp_row + 16 * m + place.row);
#pragma unroll
    for (int n = 0; n < block_kv / 16; ++n) {
      const tile::DropoutWords random = dropout.words(row, tile::Dropout::column_counter(kv_begin + 16 * n + place.column));
#pragma unroll
      for (int e = 0; e < 8; ++e) {
        float& p = P[m][2 * n + e / 4][e % 4];
        p = random.at(e / 2 % 2, e / 4, e % 2) >= dropout.threshold ? p : 0;
      }
    }
  }
}

// The epilogue of forward/sm80: O / sum -> shared memory -> global memory, 16 bytes a lane; lse; repair of rows that 0 *
// NaN has reached.

/// Writes lse, and O through the warp's own rows of shared memory.
template <ForwardConfig config>
__device__ __forceinline__ void ForwardSm80<config>::finish() {
  // The block's place is computed again, from an index that the compiler cannot recognise. If it were kept through the main
  // loop, it would need registers that the loop does not have.
  const auto block = Shape::block_of(args, ptx::hide_from_compiler(blockIdx.x));
  const tile::Sequence sequence = tile::make_sequence<features>(args, block.batch_idx);
  const int head_idx = block.head_idx, q_begin = block.tile_idx * block_q;
  const float scale_log2 = score.unit_scale() * tile::log2_e;
  float sink = -tile::infinity;
  if constexpr (features.sink) sink = args.sink[head_idx];
  float lse[m_tiles][2];
  float largest_score = -tile::infinity;
  float check = 0;  // becomes NaN if an output is not finite, or too small to be split
  // Both warps have read their queries, over which O is written; of codes all warps have read K and V.
  if constexpr (column_warps > 1 || codes) __syncthreads();
  const float v_scale = codes ? tile::head_scale<features>(args.V_scale, sequence.batch_idx, head_idx / args.group) : 1;
#pragma unroll
  for (int m = 0; m < m_tiles; ++m) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int row = warp_row + 16 * m + place.row + 8 * half, i = q_begin + row;
      const bool used = i < sequence.len_q;
      float factor = rows[m].template finish<log2_P_scale>(half, scale_log2, used ? sink : -tile::infinity, lse[m][half]);
      if constexpr (floats) {
        lse[m][half] = tile::exact_lse(rows[m].max[half], score.unit_scale(), rows[m].total(half), sink);
      }
      if constexpr (features.dropout) factor *= args.keep_scale;
      if constexpr (codes) factor *= v_scale;
      if (!used) factor = 0, lse[m][half] = -tile::infinity;
      if (args.lse != nullptr && place.column == 0 && column_warp == 0 && i < sequence.rows_q) {
        args.lse[tile::statistics_offset<features>(args, sequence, head_idx) + i] = lse[m][half];
      }
      if constexpr (features.entropy) {
        const float total = rows[m].total(half), reference = rows[m].max[half] * scale_log2 - log2_P_scale;
        const float moment = tile::reduce_quad(statistics[m].moment[half], [](float a, float b) { return a + b; });
        if (place.column == 0 && i < sequence.rows_q) {
          args.entropy[tile::statistics_offset<features>(args, sequence, head_idx) + i] =
              tile::row_entropy(reference, used ? total : 0, moment, sink);
        }
      }
      if constexpr (features.max_logit) {
        const float total = rows[m].total(half), row = total != total ? total : rows[m].max[half] * score.unit_scale();
        if (used) largest_score = tile::larger_or_nan(row, largest_score);
      }
      float largest = 0;
#pragma unroll
      for (int n = 0; n < dim_v / 8; ++n) {
        // A thread has columns 4 t to 4 t + 3 of two blocks of codes (add_code_values), else 2 t and 2 t + 1 of each block.
        float first = codes ? O[m][n / 2 * 2][2 * half + n % 2] : O[m][n][2 * half];
        float second = codes ? O[m][n / 2 * 2 + 1][2 * half + n % 2] : O[m][n][2 * half + 1];
        first *= factor, second *= factor;
        if (factor == 0) first = second = 0;
        if constexpr (repairs_rows) check = ptx::fma(first, 0, ptx::fma(second, 0, check));
        if constexpr (split) largest = ptx::max(largest, ptx::max(ptx::abs(first), ptx::abs(second)));
        if constexpr (floats) {
          const unsigned offset = split ? OTile::offset(row, 2 * n + place.column / 4) + place.column % 4 * 4
                                        : tile::fma_offset<OTile>(row, n, lane % 4);
          ptx::store_shared(Q_smem + offset, ptx::Vector<float, 2>{{first, second}});
        } else if constexpr (codes) {
          const unsigned offset = OTile::offset(row, n / 2 * 2 + place.column / 4) + place.column % 4 * 4 + n % 2 * 4;
          ptx::store_shared(Q_smem + offset, ptx::pack<type>(first, second));
        } else {
          ptx::store_shared(Q_smem + OTile::offset(row, column_warp * (dim_v / 8) + n) + 2 * place.column,
                            ptx::pack<type>(first, second));
        }
      }
      if constexpr (split) {
        largest = tile::reduce_quad(largest, [](float a, float b) { return ptx::max(a, b); });
        if (largest > 0 && largest < Shape::tiny_row) check = tile::nan;
      }
    }
  }
  if constexpr (features.max_logit) tile::raise_largest_of_warp(args, sequence.batch_idx, head_idx, lane, largest_score);
  if constexpr (repairs_rows && column_warps > 1) {
    const bool any = ptx::any(check != check);
    if (lane == 0) storage.unsound[column_warp][warp_row / rows_per_warp] = any;
  }
  sync_rows();  // all have written the warp's rows
  if constexpr (repairs_rows) {
    if (is_unsound(check)) {
#pragma unroll 1
      for (int r = 0; r < rows_per_warp; ++r) {
        float row_lse = 0;
#pragma unroll
        for (int m = 0; m < m_tiles; ++m) {
#pragma unroll
          for (int half = 0; half < 2; ++half) row_lse = r / 8 == 2 * m + half ? lse[m][half] : row_lse;
        }
        if constexpr (codes) {
          ptx::path<"forward/sm89_fp8 repaired row">();
        } else {
          ptx::path<split    ? "forward/tf32 repaired row"
                    : floats ? "forward/fp32 repaired row"
                             : "forward/sm80 repaired row">();
        }
        row_lse = ptx::shuffle(row_lse, r % 8 * 4);
        if constexpr (split) row_lse = repair_lse<config>(args, sequence, head_idx, q_begin + warp_row + r, row_lse);
        repair_output<config, OTile>(args, sequence, head_idx, q_begin + warp_row + r, row_lse, Q_smem, warp_row + r);
      }
      __syncwarp();  // the rows have been replaced
    }
    if constexpr (column_warps > 1) __syncthreads();  // both warps store some of the rows
  }
  const auto to = tile::query_rows<Element, features>(args.O, sequence, head_idx).from(q_begin);
  constexpr int stored = rows_per_warp / column_warps;
  tile::store_tile<32, config.head_dim_v, stored, OTile>(Q_smem, warp_row + column_warp * stored, to, lane);
}

template <ForwardConfig config>
__device__ __forceinline__ void forward_sm80(const AttentionArgs& args) {
  using Kernel = ForwardSm80<config>;
  auto& storage = ptx::shared_storage<typename Kernel::SharedStorage>();
  tile::clear_output_tail<config>(args, threadIdx.x, Kernel::threads);
  const auto block = Kernel::Shape::block_of(args, blockIdx.x);
  const tile::Sequence sequence = tile::make_sequence<config.features>(args, block.batch_idx);
  const int q_begin = block.tile_idx * config.block_q;
  if (q_begin >= sequence.rows_q) return;

  Kernel kernel(args, storage, sequence, block.head_idx, q_begin);
  const auto tiles = kernel.score.sight.template key_tiles<config.block_q, config.block_kv>(q_begin);
  if (tiles.begin < tiles.end) kernel.attend(tiles);
  kernel.finish();
}

}  // namespace flash_attention
