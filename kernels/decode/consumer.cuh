#pragma once

#include "decode/finish.cuh"
#include "decode/narrow.cuh"
#include "decode/scores.cuh"
#include "decode/tiles.cuh"
#include "ptx/fence.cuh"
#include "ptx/mbarrier.cuh"
#include "ptx/path.cuh"

// The warps of a decode kernel that compute: the two products of a tile of keys by mma.sync, and the running maximum and sum
// between them. Each warp has its own keys of every tile, and a running maximum of its own over them.
//
// Who brings the tiles differs: decode/sm80.cuh, decode/sm90.cuh. A Gate is what a warp passes on its way through a stage:
// K_ready() and V_ready() wait for what comes there, K_read() and V_read() say that it may be replaced.

namespace flash_attention::decode {

template <ForwardConfig config>
struct Consumer {
  static constexpr Features features = config.features;
  static constexpr Type type = features.dtype;
  static constexpr DecodeLayout layout{config};
  static constexpr int block_kv = config.block_kv, stages = config.num_stages, threads = 32 * config.num_warps;
  static constexpr int warp_keys = block_kv / layout.key_warps;
  using Finish = decode::Finish<config>;
  using Element = ptx::Element<type>;
  using KTile = typename DecodeTiles<config>::K;
  using VTile = typename DecodeTiles<config>::V;
  static constexpr int dim = DecodeLayout::columns_of(config, config.head_dim);
  static constexpr int dim_v = DecodeLayout::columns_of(config, config.head_dim_v);
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
    Cursor<config> loading[config.producer_warp ? 1 : config.num_warps];  // decode/load.cuh
    Item<config> item;                                                    // that is worked on
    tile::Sequence sequence;
    tile::KeyRange full;  // the keys that all of its rows see
    struct Barriers {
      ptx::Mbarrier K_full[stages], K_empty[stages], V_full[stages], V_empty[stages];
    } barriers;  // decode/sm90.cuh
    alignas(16) float scales[features.token_scales ? stages : 1][features.token_scales ? 2 * block_kv : 4];
  };
  static_assert(sizeof(SharedStorage) <= layout.shared_bytes);

  const AttentionArgs& args;
  SharedStorage& storage;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int warp_row = warp % layout.row_warps * 16, warp_key = warp / layout.row_warps * warp_keys;
  const tile::LanePlace place{lane};
  const unsigned Q_smem = ptx::shared_address(&storage.Q), stage_smem = ptx::shared_address(&storage.stage);

  const Run<config> run;
  const Parts<config> parts{args};
  Cursor<config> cursor = run.start;
  int item_begin = run.begin, item_tile = cursor.tile;  // of this block's part of the item
  bool same_rows = false;                               // as of the item before
  bool same_item = false;                               // another split of it

  unsigned Q[Q_in_registers ? q_steps : 1][4];
  float O[1][dim_v / 8][4];
  tile::RowState rows;
  float k_scale = 1;  // of the item's key head

  __device__ __forceinline__ Consumer(const AttentionArgs& arguments, SharedStorage& shared, const Run<config>& run_of_block)
      : args(arguments), storage(shared), run(run_of_block) {}

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

  __device__ __forceinline__ void read_Q(unsigned (&A)[4], int step) const {
    ptx::ldmatrix_x4(A, QTile::step(tile::a_address<QTile>(Q_smem, warp_row, lane), 2 * step));
  }

  /// Q of an item; rows that do not exist are zero. The barrier at the end of Finish frees its tile, and what it reads.
  __device__ __forceinline__ void start(const Item<config>& item) {
    rows = {};
#pragma unroll
    for (int n = 0; n < dim_v / 8; ++n) {
#pragma unroll
      for (int e = 0; e < 4; ++e) O[0][n][e] = 0;
    }
    if (config.split_tiles > 0 && same_item) return;
    const tile::Sequence sequence = tile::make_sequence<features>(args, item.batch_idx);
    if (threadIdx.x == 0) storage.item = item;
    if (threadIdx.x == 0 && !same_rows) {  // of another sequence, or other tokens
      const Tokens tokens = Item<config>::tokens_of(sequence, item.row_tile);
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
    sync_consumers<config>();  // Q is there for every warp
    if constexpr (Q_in_registers) {
#pragma unroll
      for (int step = 0; step < q_steps; ++step) read_Q(Q[step], step);
    }
    if constexpr (features.kv_scales) k_scale = tile::head_scale<features>(args.K_scale, item.batch_idx, item.kv_head_idx);
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
      return multiply_codes<code, type, q_steps>(
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
    score_rows<some_hidden>(S[0], args, storage.item, storage.sequence, warp_row + place.row, kv_begin + place.column);
  }

  /// O = O * shrink + P V for the warp's keys.
  __device__ __forceinline__ void add_values(const Scores& P, const float (&shrink)[2], unsigned V) {
    // Once a row has met its maximum, which is soon, nothing shrinks any more.
    if (ptx::any(shrink[0] != 1 || shrink[1] != 1)) {
#pragma unroll
      for (int n = 0; n < dim_v / 8; ++n) {
#pragma unroll
        for (int e = 0; e < 4; ++e) O[0][n][e] *= shrink[e / 2];
      }
    }
    const unsigned V_address = tile::b_address<VTile>(V, warp_key, lane);
    if constexpr (narrow) {
      return add_codes<code, type>(O, P, [&](unsigned(&codes)[4], int c, int step) {
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

  /// Tile `position` of all, which comes to a stage: the beginning of an item, and its end, if they are there.
  template <typename Gate>
  __device__ __forceinline__ void take(int position, int stage, const Gate& gate) {
    if (position == item_begin) {
      start(cursor.item);
      // The counts of the items that this block may share, while its first tiles are on their way.
      if (position == run.begin && threadIdx.x == 0) {
        parts.prepare(static_cast<int>(blockIdx.x));
        parts.prepare(run.first_block());
      }
    }
    attend(item_tile + position - item_begin, stage, gate);
    const int count = position + 1 - item_begin;
    if (item_tile + count < storage.item.split_end(item_tile) && position + 1 < run.end) return;
    cursor.item = storage.item;  // kept there meanwhile
    Finish{args, storage.finish, storage.sequence, storage.item}(run, parts, item_tile, count, item_begin, rows, O,
                                                                 scale_log2());
    item_begin = position + 1;
    cursor.tile = item_tile + count - 1;
    same_item = item_tile + count < cursor.item.end_tile;
    const int batch_idx = cursor.item.batch_idx, row_tile = cursor.item.row_tile;
    if (item_begin < run.end) cursor.next(args);
    item_tile = cursor.tile;
    same_rows = cursor.item.batch_idx == batch_idx && cursor.item.row_tile == row_tile;
  }

  /// One tile of keys, which comes to a stage.
  template <typename Gate>
  __device__ __forceinline__ void attend(int tile_idx, int stage, const Gate& gate) {
    const int kv_begin = tile_idx * block_kv + warp_key;
    const tile::KeyRange seen = storage.item.seen, full = storage.full;
    gate.K_ready();
    if (kv_begin >= seen.end || kv_begin + warp_keys <= seen.begin) {
      ptx::path<"decode/sm80 warp without keys">();
      gate.K_read();
      gate.V_ready();
      return gate.V_read();
    }
    Scores S{};
    multiply_keys(S, K_smem(stage));
    gate.K_read();
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
    rows.template update<0, config.features.bias, true>(S[0], scale_log2(), shrink);
    if constexpr (features.token_scales) scale_columns<Finish::lift>(S, storage.scales[stage] + block_kv);
    gate.V_ready();
    if constexpr (config.producer_warp) clear_unseen_values(kv_begin, seen, V_smem(stage));
    add_values(S, shrink, V_smem(stage));
    gate.V_read();
  }

  /// Boxes bring rows that nobody sees, or leave what was there before. Those of the warp's keys become zero: a probability
  /// of 0 times NaN would be NaN.
  __device__ __forceinline__ void clear_unseen_values(int kv_begin, const tile::KeyRange& seen, unsigned V) const {
    if (kv_begin >= seen.begin && kv_begin + warp_keys <= seen.end) return;
    ptx::path<"decode/sm90 unseen values">();
    constexpr int chunks = VTile::columns / 8;
    for (int index = lane; index < warp_keys * chunks; index += 32) {
      const int row = index / chunks, j = kv_begin + row;
      if (j >= seen.begin && j < seen.end) continue;
      ptx::store_shared(V + VTile::offset(warp_key + row, index % chunks), ptx::Vector<unsigned, 4>{});
    }
    ptx::fence_async_shared();  // the next box that comes here is written later
    __syncwarp();               // all rows are clear before they are read
  }
};

}  // namespace flash_attention::decode
