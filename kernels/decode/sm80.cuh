#pragma once

#include "decode/finish.cuh"
#include "decode/load.cuh"
#include "decode/narrow.cuh"
#include "decode/scores.cuh"
#include "ptx/path.cuh"
#include "tile/tail.cuh"

// Attention forward for few queries, where reading K and V once is all the work: mma.sync and cp.async, sm_80 and up,
// 16-bit types, K and V in pages or not.
//
// The rows of all query heads of a key head, of some query tokens, are one tile: row = token * group + head in group. The
// tiles of keys of all sequences and key heads are shared out evenly (decode/schedule.cuh): one launch, as many blocks as
// the GPU holds. A block:
//
//   tiles [begin, end) of all;  num_stages - 1 of them on their way
//   for each item (rows of a key head) that these belong to:
//     Q -> shared -> registers
//     for each tile of block_kv keys:
//       one more tile on its way;  wait for the oldest
//       each warp, its own keys:   S = Q K^T;  P = softmax step;  O = O * shrink + P V
//     finish: the warps' O, maxima and sums together -> O, lse, or a part of them (decode/finish.cuh)
//
// A warp keeps a running maximum of its own, over its own keys. With 16 rows or fewer it reads what it has copied itself,
// so that the loop over tiles has no barrier at all.

namespace flash_attention {

using namespace abi;

template <ForwardConfig config>
struct DecodeSm80 {
  static constexpr Features features = config.features;
  static constexpr Type type = features.dtype;
  static constexpr DecodeLayout layout{config};
  static constexpr int block_kv = config.block_kv, stages = config.num_stages, threads = 32 * config.num_warps;
  static constexpr int warp_keys = block_kv / layout.key_warps;
  using Loader = decode::Loader<config>;
  using Finish = decode::Finish<config>;
  using Element = ptx::Element<type>;
  using KTile = typename Loader::KTile;
  using VTile = typename Loader::VTile;
  static constexpr int dim = Loader::dim, dim_v = Loader::dim_v;
  static constexpr Type code = key_type(features);
  static constexpr bool narrow = is_narrow(code);
  static constexpr int q_steps = dim / 16;
  static constexpr bool Q_in_registers = q_steps <= 8 && layout.row_warps == 1;
  using QTile = tile::SwizzledTile<16 * layout.row_warps, dim>;
  static_assert(type != Type::float32 && !features.dropout && warp_keys % 16 == 0 && stages >= 2);
  static_assert(layout.key_warps * layout.row_warps == config.num_warps);

  struct SharedStorage {
    struct Stage {
      KTile K;
      VTile V;
    } stage[stages];
    QTile Q;
    typename Finish::SharedStorage finish;
    // The same for all threads, and read now and then: no place for registers.
    decode::Cursor<config> loading[config.num_warps];
    decode::Item<config> item;  // that is worked on
    tile::Sequence sequence;
    tile::KeyRange full;  // the keys that all of its rows see
    alignas(16) float scales[features.token_scales ? stages : 1][features.token_scales ? 2 * block_kv : 4];
  };
  static_assert(sizeof(SharedStorage) <= layout.shared_bytes);

  const AttentionArgs& args;
  SharedStorage& storage;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int warp_row = warp % layout.row_warps * 16, warp_key = warp / layout.row_warps * warp_keys;
  const tile::LanePlace place{lane};
  const unsigned Q_smem = ptx::shared_address(&storage.Q), stage_smem = ptx::shared_address(&storage.stage);

  unsigned Q[Q_in_registers ? q_steps : 1][4];
  float O[1][dim_v / 8][4];
  tile::RowState rows;
  float k_scale = 1;  // of the item's key head

  __device__ __forceinline__ DecodeSm80(const AttentionArgs& arguments, SharedStorage& shared)
      : args(arguments), storage(shared) {}

  /// Of a score in its units to powers of two.
  __device__ __forceinline__ float scale_log2() const {
    return (tile::Score<features>::linear ? args.scale * k_scale : 1.0f) * tile::log2_e;
  }
  __device__ __forceinline__ unsigned K_smem(int stage) const {
    return stage_smem + stage * static_cast<unsigned>(sizeof(typename SharedStorage::Stage));
  }
  __device__ __forceinline__ unsigned V_smem(int stage) const { return K_smem(stage) + sizeof(KTile); }
  __device__ __forceinline__ unsigned scale_smem(int stage) const {
    return features.token_scales ? ptx::shared_address(&storage.scales[stage]) : 0;
  }

  /// Who reads what a warp has copied: the warp alone, or all.
  __device__ __forceinline__ static void sync_readers() {
    if constexpr (layout.row_warps == 1) {
      __syncwarp();
    } else {
      ptx::path<"decode/sm80 rows of several warps">();
      __syncthreads();
    }
  }

  __device__ __forceinline__ void read_Q(unsigned (&A)[4], int step) const {
    ptx::ldmatrix_x4(A, QTile::step(tile::a_address<QTile>(Q_smem, warp_row, lane), 2 * step));
  }

  /// Q of an item; rows that do not exist are zero. The barrier at the end of Finish frees its tile, and what it reads.
  __device__ __forceinline__ void start(const decode::Item<config>& item, bool same_rows) {
    const tile::Sequence sequence = tile::make_sequence<features>(args, item.batch_idx);
    if (threadIdx.x == 0) storage.item = item;
    if (threadIdx.x == 0 && !same_rows) {  // of another sequence, or other tokens
      const decode::Tokens tokens = decode::Item<config>::tokens_of(sequence, item.row_tile);
      const tile::Score<features> score(args, sequence, item.kv_head_idx * config.group);
      storage.sequence = sequence;
      storage.full = score.keys_of_all(tokens.begin, tokens.end);
    }
    constexpr int chunks = dim / 8;
    using Chunk = ptx::Vector<unsigned, 4>;
    for (int index = threadIdx.x; index < QTile::rows * chunks; index += threads) {
      const int row = index / chunks, chunk = index % chunks, packed = item.row_tile * config.block_q + row;
      const int query = packed / config.group, head_idx = item.kv_head_idx * config.group + packed % config.group;
      Chunk values{};
      if (row < config.block_q && query < sequence.rows_q && chunk * 8 < config.head_dim) {
        const auto* from = tile::query_rows<const Element, features>(args.Q, sequence, head_idx).row(query) + chunk * 8;
        values = ptx::load_readonly(reinterpret_cast<const Chunk*>(from));
      }
      store_Q(row, chunk, values);
    }
    __syncthreads();  // Q is there for every warp
    if constexpr (Q_in_registers) {
#pragma unroll
      for (int step = 0; step < q_steps; ++step) read_Q(Q[step], step);
    }
    rows = {};
    if constexpr (features.kv_scales) k_scale = tile::head_scale<features>(args.K_scale, item.batch_idx, item.kv_head_idx);
#pragma unroll
    for (int n = 0; n < dim_v / 8; ++n) {
#pragma unroll
      for (int e = 0; e < 4; ++e) O[0][n][e] = 0;
    }
  }

  using Scores = float[1][warp_keys / 8][4];

  /// Eight columns of a row of Q. K in 8 bits comes with four neighbouring columns to a lane, 4t to 4t + 3 of each 16,
  /// which the products take as columns 2t, 2t + 1, 2t + 8 and 2t + 9: so Q is laid out in that order, too.
  __device__ __forceinline__ void store_Q(int row, int chunk, const ptx::Vector<unsigned, 4>& values) const {
    if constexpr (narrow) {
#pragma unroll
      for (int word = 0; word < 4; ++word) {
        const int pair = chunk % 2 * 4 + word, to = pair % 2 * 4 + pair / 2;
        ptx::store_shared(Q_smem + QTile::offset(row, chunk / 2 * 2 + to / 4) + to % 4 * 4, values[word]);
      }
    } else {
      ptx::store_shared(Q_smem + QTile::offset(row, chunk), values);
    }
  }

  __device__ __forceinline__ void take_Q(unsigned (&A)[4], int step) const {
    if constexpr (Q_in_registers) {
#pragma unroll
      for (int e = 0; e < 4; ++e) A[e] = Q[step][e];
    } else {
      read_Q(A, step);
    }
  }

  /// S = Q K^T for the warp's keys.
  __device__ __forceinline__ void multiply_keys(Scores& S, unsigned K) const {
    const unsigned K_address = tile::b_transposed_address<KTile>(K, warp_key, lane);
    if constexpr (narrow) {
      return decode::multiply_codes<code, type, q_steps>(
          S, [&](unsigned(&A)[4], int step) { take_Q(A, step); },
          [&](unsigned(&codes)[4], int n, int step) {
            ptx::ldmatrix_x4(codes, KTile::step(K_address, step) + n * 16 * 128);
          });
    }
    tile::multiply<type, q_steps>(
        S, [&](unsigned(&A)[4], int, int step) { take_Q(A, step); },
        [&](unsigned(&B)[4], int n, int step) { ptx::ldmatrix_x4(B, KTile::step(K_address, 2 * step) + n * 16 * 128); });
  }

  /// Scores from dot products, -inf where hidden.
  template <bool some_hidden>
  __device__ __forceinline__ void score_tile(Scores& S, int kv_begin) const {
    decode::score_rows<some_hidden>(S[0], args, storage.item, storage.sequence, warp_row + place.row,
                                    kv_begin + place.column);
  }

  /// O = O * shrink + P V for the warp's keys.
  __device__ __forceinline__ void add_values(const Scores& P, const float (&shrink)[2], unsigned V) {
#pragma unroll
    for (int n = 0; n < dim_v / 8; ++n) {
#pragma unroll
      for (int e = 0; e < 4; ++e) O[0][n][e] *= shrink[e / 2];
    }
    const unsigned V_address = tile::b_address<VTile>(V, warp_key, lane);
    if constexpr (narrow) {
      return decode::add_codes<code, type>(O, P, [&](unsigned(&codes)[4], int c, int step) {
        ptx::ldmatrix_x4_trans(codes, VTile::step(V_address, 2 * c) + step * 16 * 128);
      });
    }
    tile::multiply<type, warp_keys / 16>(
        O, [&](unsigned(&A)[4], int, int step) { tile::pack_a<type>(A, P[0][2 * step], P[0][2 * step + 1]); },
        [&](unsigned(&B)[4], int n, int step) {
          ptx::ldmatrix_x4_trans(B, VTile::step(V_address, 2 * n) + step * 16 * 128);
        });
  }

  /// Scores, or probabilities, times the scales of the warp's keys.
  template <int lift>
  __device__ __forceinline__ void scale_columns(Scores& S, const float* scales) const {
#pragma unroll
    for (int n = 0; n < warp_keys / 8; ++n) {
      const auto pair =
          ptx::load_shared<ptx::Vector<float, 2>>(ptx::shared_address(scales + warp_key + 8 * n + place.column));
#pragma unroll
      for (int e = 0; e < 4; ++e) S[0][n][e] *= pair[e % 2] * lift;
    }
  }

  /// One tile of keys, which lies in a stage.
  __device__ __forceinline__ void attend(int tile_idx, int stage) {
    const int kv_begin = tile_idx * block_kv + warp_key;
    const tile::KeyRange seen = storage.item.seen, full = storage.full;
    if (kv_begin >= seen.end || kv_begin + warp_keys <= seen.begin) {
      ptx::path<"decode/sm80 warp without keys">();
      return;
    }
    Scores S{};
    multiply_keys(S, K_smem(stage));
    if constexpr (features.token_scales) scale_columns<1>(S, storage.scales[stage]);
    if (kv_begin < full.begin || kv_begin + warp_keys > full.end) {
      ptx::path<"decode/sm80 edge tile">();
      score_tile<true>(S, kv_begin);
    } else if constexpr (!tile::Score<features>::linear) {
      ptx::path<"decode/sm80 inner tile with options">();
      score_tile<false>(S, kv_begin);
    } else {
      ptx::path<"decode/sm80 inner tile">();
    }
    float shrink[2];
    rows.template update<0, config.features.bias, (config.split_tiles > 0)>(S[0], scale_log2(), shrink);
    if constexpr (features.token_scales) scale_columns<Finish::lift>(S, storage.scales[stage] + block_kv);
    add_values(S, shrink, V_smem(stage));
  }

  __device__ __forceinline__ static int after(int stage) { return stage + 1 == stages ? 0 : stage + 1; }

  /// One loop over the block's tiles, with one place that loads: the code is short, and fetched while memory is idle.
  __device__ __forceinline__ void work() {
    const decode::Run<config> run(args);
    if (run.begin == run.end) return;
    const decode::Parts<config> parts(args);
    Loader loader(args, run, storage.loading[warp]);
    decode::Cursor<config> cursor = run.start;
    bool same_rows = false;
    int item_begin = run.begin, item_tile = cursor.tile;  // of this block's part of the item
    int stage = 0, free_stage = 0;
#pragma unroll 1
    for (int position = run.begin - (stages - 1); position < run.end; ++position) {
      loader.load(K_smem(free_stage), V_smem(free_stage), scale_smem(free_stage));
      free_stage = after(free_stage);
      if (position < run.begin) continue;  // the first tiles are on their way
      if (position == item_begin) {
        start(cursor.item, same_rows);
        // The counts of the items that this block may share, while its first tiles are on their way.
        if (position == run.begin && threadIdx.x == 0) {
          parts.prepare(static_cast<int>(blockIdx.x));
          parts.prepare(run.first_block());
        }
      }
      ptx::copy_async_wait<stages - 1>();
      sync_readers();  // the tile has landed, from all copies of those who read it
      attend(item_tile + position - item_begin, stage);
      sync_readers();  // it has been read: the next copies may go there
      stage = after(stage);
      const int count = position + 1 - item_begin;
      if (item_tile + count < storage.item.split_end(item_tile) && position + 1 < run.end) continue;
      cursor.item = storage.item;  // kept there meanwhile
      Finish{args, storage.finish, storage.sequence, storage.item}(run, parts, item_tile, count, item_begin, rows, O,
                                                                   scale_log2());
      item_begin = position + 1;
      cursor.tile = item_tile + count - 1;
      const int batch_idx = cursor.item.batch_idx, row_tile = cursor.item.row_tile;
      if (item_begin < run.end) cursor.next(args);
      item_tile = cursor.tile;
      same_rows = cursor.item.batch_idx == batch_idx && cursor.item.row_tile == row_tile;
    }
  }
};

template <ForwardConfig config>
__device__ __forceinline__ void decode_sm80(const AttentionArgs& args) {
  tile::clear_output_tail<config>(args, threadIdx.x, 32 * config.num_warps);
  DecodeSm80<config>(args, ptx::shared_storage<typename DecodeSm80<config>::SharedStorage>()).work();
}

}  // namespace flash_attention
