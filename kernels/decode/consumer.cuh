#pragma once

// The consumer warps of a decode kernel: the two products of a KV block with mma.sync, and the online softmax between
// them. Each warp has separate keys of every block, and keeps an online maximum over its keys only. If the order of
// sums is fixed, ordered.cuh is used instead: there all warps share one maximum.
//
//   for each KV block of the run:                                                   take
//     at the beginning of an item: Q -> shared memory -> registers                  load_Q
//     wait for K;  S = Q K^T;  release K;  P = softmax step                         attend
//     wait for V;  O = O * rescale + P V;  release V
//     at the end of an item or of the run: combine O, maxima and sums of all warps  finish.cuh
//
// The loads are elsewhere: decode/sm80.cuh, decode/sm90.cuh. Both pass a Gate, which synchronises a warp with the loads of
// a stage: K_ready() and V_ready() wait for them; K_read() and V_read() allow the stage to be filled again.
//
// Registers: O is 16 rows x head_dim_v floats, over the 32 lanes of a warp (64 a thread at 128 columns); the scores of a
// warp's keys, and Q if it has at most 128 columns. What is the same for all threads is in shared memory (shape.cuh).

#include "decode/ordered.cuh"
#include "decode/scores.cuh"
#include "decode/shape.cuh"
#include "ptx/fence.cuh"
#include "ptx/path.cuh"
#include "tile/mma.cuh"
#include "tile/narrow_pairs.cuh"

namespace flash_attention::decode {

using namespace abi;

// The two products if K and V have 8 bits. The codes become 16-bit elements in registers.
//
// ldmatrix moves pairs of bytes, so the columns arrive in another order. For K, lane t of four gets the neighbouring
// columns 4t to 4t + 3 of 16. The products take them as columns 2t, 2t + 1, 2t + 8 and 2t + 9. Q is stored in the same
// order (store_Q), so the sums are unchanged. For V, which is transposed, a lane gets columns 2g and 2g + 1 of keys 2t
// and 2t + 1. So the accumulators hold a block of eight even columns and one of eight odd columns; Finish stores them
// accordingly.

/// S += Q K^T. load_Q(A, step) loads 16 columns of Q. load_codes(codes, n, step) loads 16 keys, the columns of two steps.
template <Type code, Type type, int steps, int blocks, typename LoadQ, typename LoadCodes>
__device__ __forceinline__ void multiply_codes(float (&S)[1][blocks][4], LoadQ load_Q, LoadCodes load_codes) {
  static_assert(steps % 2 == 0);
#pragma unroll
  for (int step = 0; step < steps; step += 2) {
    unsigned A[2][4];
    load_Q(A[0], step);
    load_Q(A[1], step + 1);
#pragma unroll
    for (int n = 0; n < blocks / 2; ++n) {
      unsigned codes[4];  // (keys 0-7, step), (keys 0-7, step + 1), (keys 8-15, step), (keys 8-15, step + 1)
      load_codes(codes, n, step);
#pragma unroll
      for (int u = 0; u < 2; ++u) {
        const tile::TwoPairs first = tile::to_pairs<code, type>(codes[u]),
                             second = tile::to_pairs<code, type>(codes[2 + u]);
        const unsigned B[4] = {first.first, first.second, second.first, second.second};
        tile::mma_pair<type>(S[0][2 * n], S[0][2 * n + 1], A[u], B);
      }
    }
  }
}

/// O += P V. load_P(A, step) loads P of 16 keys. load_codes(codes, c, step) loads columns 32c to 32c + 31 of them,
/// transposed; of the columns `units` times 32 exist.
template <Type code, Type type, int steps, int blocks, typename LoadP, typename LoadCodes>
__device__ __forceinline__ void add_codes(float (&O)[1][blocks][4], LoadP load_P, LoadCodes load_codes,
                                          int units = blocks / 4) {
  static_assert(blocks % 4 == 0);
#pragma unroll
  for (int step = 0; step < steps; ++step) {
    unsigned A[4];
    load_P(A, step);
#pragma unroll
    for (int c = 0; c < blocks / 4; ++c) {
      if (c >= units) break;
      unsigned codes[4];  // (keys 0-7, 16 columns), (keys 8-15, 16 columns), and the next 16 columns
      load_codes(codes, c, step);
#pragma unroll
      for (int u = 0; u < 2; ++u) {
        const auto even_and_odd = [](unsigned x) { return tile::to_pairs<code, type, true>(x); };
        const tile::TwoPairs first = even_and_odd(codes[2 * u]), second = even_and_odd(codes[2 * u + 1]);
        const unsigned B[4] = {first.first, second.first, first.second, second.second};
        tile::mma_pair<type>(O[0][4 * c + 2 * u], O[0][4 * c + 2 * u + 1], A, B);
      }
    }
  }
}

template <ForwardConfig config>
struct Consumer {
  using Shape = ConsumerShape<config>;
  using KTile = typename Shape::KTile;
  using VTile = typename Shape::VTile;
  using QTile = typename Shape::QTile;
  using Element = typename Shape::Element;
  using Finish = typename Shape::Finish;
  using SharedStorage = typename Shape::SharedStorage;
  static constexpr Features features = config.features;
  static constexpr Type type = features.dtype, code = Shape::code;
  static constexpr DecodeLayout layout{config};
  static constexpr int block_kv = config.block_kv, stages = config.num_stages, threads = Shape::threads;
  static constexpr int warp_keys = Shape::warp_keys, dim = Shape::dim, dim_v = Shape::dim_v, q_steps = Shape::q_steps;
  static constexpr bool narrow = Shape::narrow, grouped = Shape::grouped, Q_in_registers = Shape::Q_in_registers;
  static constexpr int own_value_bytes = VTile::panels / layout.column_warps * VTile::panel_bytes;  // from warp to warp
  static constexpr bool ordered = has_fixed_order(config);
  using Order = decode::Order<config>;

  static constexpr int chunks = dim / 8;
  using Chunk = ptx::Vector<unsigned, 4>;
  /// If registers allow it, Q of the next item is loaded to registers while the current item ends.
  static constexpr int own_chunks = tile::ceil_div(QTile::rows * chunks, threads);
  static constexpr bool fetches_early = config.producer_warp && own_chunks <= 2 && tile::Score<features>::linear;

  const AttentionArgs& args;
  SharedStorage& storage;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int warp_row = warp % layout.row_warps * 16;
  const int warp_key = warp / layout.row_warps % layout.tile_warps * warp_keys;
  const int column_warp = layout.column_warps == 1 ? 0 : warp / (layout.row_warps * layout.key_warps);
  const tile::LanePlace place{lane};
  const unsigned Q_smem = ptx::shared_address(&storage.Q);
  unsigned Q[Q_in_registers ? q_steps : 1][4];

  Chunk fetched[fetches_early ? own_chunks : 1];

  const unsigned stage_smem = ptx::shared_address(&storage.stage), groups_smem = ptx::shared_address(&storage.groups);
  const Run<config> run;
  const Parts<config> parts{args};
  Cursor<config> cursor = run.start;
  int item_begin = run.begin, item_tile = cursor.tile;  // of this block's part of the item: position in the run, key tile
  bool same_rows = false;                               // the previous item had the same sequence and tokens
  bool same_item = false;                               // the previous tiles were another split of the same item

  using Sums = tile::Choose<grouped, typename Finish::Rows::Sums, float[1][Shape::own_columns / 8][4]>;
  static constexpr int sum_blocks = static_cast<int>(sizeof(Sums) / sizeof(float[4]));
  Sums O;
  typename Finish::Rows::State rows;
  float k_scale = 1;  // of the item's key head, if K has 8 bits and a scale for each head

  __device__ __forceinline__ Consumer(const AttentionArgs& arguments, SharedStorage& shared,
                                      const Run<config>& run_of_block)
      : args(arguments), storage(shared), run(run_of_block) {
    if constexpr (fetches_early) fetch_Q(cursor.item);
    if constexpr (ordered) {
      if (threadIdx.x < 2) storage.order.suspect[threadIdx.x] = 0;  // the barrier of load_Q follows
    }
    keep_cursor();
  }

  /// With 4-bit keys the place of the next item is in shared memory until it begins, to save registers.
  __device__ __forceinline__ void keep_cursor() {
    if constexpr (grouped) {
      if (lane == 0) storage.taking[warp] = cursor;
      __syncwarp();  // all lanes will see it
    }
  }

  // -- Q of an item: to shared memory, then to registers if there are enough ----------------------------------------------

  /// Eight columns of a row of Q; zeros if the row or the columns do not exist.
  __device__ __forceinline__ Chunk chunk_of(const Item<config>& item, const tile::Sequence& sequence, int index) const {
    const int chunk = index % chunks;
    const Element* row = query_row(item, sequence, index / chunks);
    if (row == nullptr || chunk * 8 >= config.head_dim) return {};
    return ptx::load_readonly(reinterpret_cast<const Chunk*>(row + chunk * 8));
  }

  /// A row of Q; null if it does not exist.
  __device__ __forceinline__ const Element* query_row(const Item<config>& item, const tile::Sequence& sequence,
                                                      int row) const {
    const int packed = item.first_row() + row;
    const int query = packed / config.group, head_idx = item.kv_head_idx * config.group + packed % config.group;
    if (row >= config.block_q || query >= sequence.rows_q) return nullptr;
    if (features.key_list && packed >= item.end_row(sequence.rows_q * config.group)) return nullptr;  // another query's
    return tile::query_rows<const Element, features>(args.Q, sequence, head_idx).row(query);
  }

  __device__ __forceinline__ void read_Q(unsigned (&A)[4], int step) const {
    ptx::ldmatrix_x4(A, QTile::step(tile::a_address<QTile>(Q_smem, warp_row, lane), 2 * step));
  }

  /// Stores eight columns of a row of Q. If K has 8 bits, in the order in which the products see its columns: 4t to 4t + 3
  /// of each 16 become 2t, 2t + 1, 2t + 8 and 2t + 9 (see above).
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

  __device__ __forceinline__ void fetch_Q(const Item<config>& item) {
    const tile::Sequence sequence = tile::make_sequence<features>(args, item.batch_idx);
#pragma unroll
    for (int own = 0; own < own_chunks; ++own) fetched[own] = chunk_of(item, sequence, threadIdx.x + own * threads);
  }

  /// Q of an item, for every warp. The barrier at the end of the previous item's Finish allows to overwrite the tile of Q
  /// and the state in shared memory. same_rows: sequence and tokens are those of the previous item.
  __device__ __forceinline__ void load_Q(const Item<config>& item, bool same_rows) {
    const tile::Sequence sequence = tile::make_sequence<features>(args, item.batch_idx);
    if (threadIdx.x == 0) storage.item = item;
    if (threadIdx.x == 0 && !same_rows) {
      const Tokens tokens = Item<config>::tokens_of(sequence, item.row_tile);
      const tile::Visibility<features> sight(args, sequence, item.kv_head_idx * config.group);
      storage.sequence = sequence;
      storage.full = features.key_list ? tile::KeyRange{0, 0} : sight.keys_of_all(tokens.begin, tokens.end);
    }
    if constexpr (grouped) {
      Turned<config>::store_Q(storage.Q, [&](int row) { return query_row(item, sequence, row); });
    } else if constexpr (fetches_early) {
#pragma unroll
      for (int own = 0; own < own_chunks; ++own) {
        const int index = static_cast<int>(threadIdx.x) + own * threads;
        if (index < QTile::rows * chunks) store_Q(index / chunks, index % chunks, fetched[own]);
      }
    } else {
      for (int index = threadIdx.x; index < QTile::rows * chunks; index += threads)
        store_Q(index / chunks, index % chunks, chunk_of(item, sequence, index));
    }
    sync_consumers<config>();  // Q is ready for every warp
    if constexpr (Q_in_registers) {
#pragma unroll
      for (int step = 0; step < q_steps; ++step) read_Q(Q[step], step);
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

  // -- products and softmax ---------------------------------------------------------------------------------------------

  /// Factor from scores to exponents of two. A linear score is still a dot product, so the factor includes the scale.
  __device__ __forceinline__ float scale_log2() const {
    return (tile::Score<features>::linear ? args.scale * k_scale * tile::group_factor<code> : 1.0f) * tile::log2_e;
  }
  __device__ __forceinline__ unsigned K_smem(int stage) const {
    return stage_smem + stage * static_cast<unsigned>(sizeof(typename SharedStorage::Stage));
  }
  __device__ __forceinline__ unsigned V_smem(int stage) const { return K_smem(stage) + SharedStorage::Stage::value_offset; }
  __device__ __forceinline__ unsigned scale_smem(int stage) const {
    if constexpr (grouped) return groups_smem;
    return features.token_scales ? ptx::shared_address(&storage.scales[stage]) : 0;
  }

  __device__ __forceinline__ unsigned* listed(int stage) const { return storage.listed[features.key_list ? stage : 0]; }

  /// Begins an item, or another split of the same item.
  __device__ __forceinline__ void start(const Item<config>& item) {
    if (config.split_tiles == 0 || !same_item) {
      load_Q(item, same_rows);
      if constexpr (features.kv_scales)
        k_scale = tile::head_scale<features>(args.K_scale, item.batch_idx, item.kv_head_idx);
    }
    rows = {};
    if constexpr (ordered) {  // a row that does not exist would wait for a reference in every tile
      const int end = item.end_row(storage.sequence.len_q * config.group) - item.first_row();
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        if (place.row + 8 * half >= end) rows.max[half] = 0;
      }
    }
#pragma unroll
    for (int n = 0; n < sum_blocks; ++n) {
#pragma unroll
      for (int e = 0; e < 4; ++e) O[0][n][e] = 0;
    }
  }

  using Scores = float[1][warp_keys / 8][4];

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

  /// The same with lists of keys. A key that the query does not see has no bit, for all rows of the query; and no score
  /// depends on the key's position.
  __device__ __forceinline__ void score_listed(Scores& S, int stage) const {
    const tile::Score<features> score(args, storage.sequence, storage.item.kv_head_idx * config.group);
#pragma unroll
    for (int n = 0; n < warp_keys / 8; ++n) {
      const int first = warp_key + 8 * n;
      const unsigned bits = storage.listed[stage][first / 32] >> first % 32 >> place.column;
#pragma unroll
      for (int e = 0; e < 4; ++e) S[0][n][e] = bits >> e % 2 & 1 ? score.in_units(S[0][n][e], 0, 0) : -tile::infinity;
    }
  }

  /// O = O * rescale + P V for the warp's keys. are_first: O is still zero, so there is nothing to rescale.
  __device__ __forceinline__ void add_values(const Scores& P, const float (&rescale)[2], unsigned V, bool are_first) {
    // Soon all rows have seen their maximum. From then on every factor is 1, and the vote saves the multiplications.
    if (!are_first && ptx::any(rescale[0] != 1 || rescale[1] != 1)) {
#pragma unroll
      for (int n = 0; n < dim_v / 8; ++n) {
#pragma unroll
        for (int e = 0; e < 4; ++e) O[0][n][e] *= rescale[e / 2];
      }
    }
    const unsigned V_address = tile::b_address<VTile>(V, warp_key, lane) + column_warp * own_value_bytes;
    if constexpr (narrow) {
      return add_codes<code, type, warp_keys / 16>(
          O, [&](unsigned(&A)[4], int step) { tile::pack_a<type>(A, P[0][2 * step], P[0][2 * step + 1]); },
          [&](unsigned(&codes)[4], int c, int step) {
            ptx::ldmatrix_x4_trans(codes, VTile::step(V_address, 2 * c) + step * 16 * 128);
          });
    }
    tile::multiply<type, warp_keys / 16>(
        O, [&](unsigned(&A)[4], int, int step) { tile::pack_a<type>(A, P[0][2 * step], P[0][2 * step + 1]); },
        [&](unsigned(&B)[4], int n, int step) {
          ptx::ldmatrix_x4_trans(B, VTile::step(V_address, 2 * n) + step * 16 * 128);
        });
  }

  /// Multiplies scores or probabilities by the scales of the warp's keys.
  template <int P_scale>
  __device__ __forceinline__ void scale_columns(Scores& S, const float* scales) const {
#pragma unroll
    for (int n = 0; n < warp_keys / 8; ++n) {
      const auto pair =
          ptx::load_shared<ptx::Vector<float, 2>>(ptx::shared_address(scales + warp_key + 8 * n + place.column));
#pragma unroll
      for (int e = 0; e < 4; ++e) S[0][n][e] *= pair[e % 2] * P_scale;
    }
  }

  /// Processes tile `position`, which is in `stage`. Begins an item before its first tile and finishes it after its last.
  template <typename Gate>
  __device__ __forceinline__ void take(int position, int stage, const Gate& gate) {
    if (position == item_begin) {
      if constexpr (grouped) cursor = storage.taking[warp];
      start(cursor.item);
      // This block may share its first and its last item with others. Their counters are prepared here, where the memory
      // latency overlaps with the first tiles.
      if (!Finish::Cluster::in_cluster && Finish::Rows::shares_items && position == run.begin && threadIdx.x == 0) {
        parts.prepare(static_cast<int>(blockIdx.x));
        parts.prepare(run.first_block());
      }
    }
    attend(item_tile + position - item_begin, position, stage, gate);
    const int count = position + 1 - item_begin;
    if (item_tile + count < storage.item.split_end(item_tile) && position + 1 < run.end) return;
    const Finish finish{{args, storage.finish, storage.sequence, storage.item}};
    const int tile = item_tile, begin = item_begin;
    cursor = {storage.item, tile + count - 1};  // the item was only in shared memory, where the next one will replace it
    // The other blocks of a cluster send their parts to a stage that no tile used, or else over the tiles.
    const int free_stage = Finish::Cluster::in_cluster && Finish::Cluster::has_free_stage(storage.item) ? stages - 1 : 0;
    auto* received = reinterpret_cast<float*>(&storage.stage[free_stage]);
    // finish() is written twice so that the next Q is loaded before it, if there are registers to hold it.
    if constexpr (!fetches_early) finish(run, parts, tile, count, begin, rows, O, scale_log2(), received);
    if constexpr (config.item_blocks == 0) next_item(position, count);
    if constexpr (fetches_early) finish(run, parts, tile, count, begin, rows, O, scale_log2(), received);
  }

  /// Moves on to the next item or split. If registers allow it, starts to load the Q of the next item.
  __device__ __forceinline__ void next_item(int position, int count) {
    const int batch_idx = cursor.item.batch_idx, row_tile = cursor.item.row_tile;
    same_item = item_tile + count < cursor.item.end_tile;
    item_begin = position + 1;
    if (item_begin < run.end) {
      cursor.next(args);
      if (fetches_early && (config.split_tiles == 0 || !same_item)) fetch_Q(cursor.item);
    }
    item_tile = cursor.tile;
    same_rows = cursor.item.batch_idx == batch_idx && cursor.item.row_tile == row_tile;
    keep_cursor();
  }

  /// S, softmax step and O for one KV block, which is tile `position` of the run.
  template <typename Gate>
  __device__ __forceinline__ void attend(int tile_idx, int position, int stage, const Gate& gate) {
    const int kv_begin = tile_idx * block_kv + warp_key;
    const tile::KeyRange seen = storage.item.seen;
    gate.K_ready();
    if constexpr (ordered) return attend_in_order(kv_begin, position, stage, gate);
    const bool own = config.key_groups == 1 || tile_idx % config.key_groups == warp / layout.tile_warps;
    if (!own || kv_begin >= seen.end || kv_begin + warp_keys <= seen.begin) {
      ptx::path<"decode/sm80 warp without keys">();
      gate.K_read();
      gate.V_ready();
      return gate.V_read();
    }
    const bool are_first = tile_idx < item_tile + config.key_groups;
    if constexpr (grouped) {
      attend_turned(kv_begin, stage, are_first, gate);
    } else {
      attend_rows(kv_begin, stage, are_first, gate);
    }
  }

  /// The same for a warp that has keys of the block.
  template <typename Gate>
  __device__ __forceinline__ void attend_rows(int kv_begin, int stage, bool are_first, const Gate& gate) {
    const tile::KeyRange seen = storage.item.seen, full = storage.full;
    Scores S{};
    multiply_keys(S, K_smem(stage));
    gate.K_read();
    if constexpr (features.token_scales) scale_columns<1>(S, storage.scales[stage]);
    if constexpr (features.key_list) {
      score_listed(S, stage);
    } else if (kv_begin < full.begin || kv_begin + warp_keys > full.end) {
      ptx::path<"decode/sm80 edge tile">();
      score_tile<true>(S, kv_begin);
    } else if constexpr (!tile::Score<features>::linear) {
      ptx::path<"decode/sm80 inner tile with options">();
      score_tile<false>(S, kv_begin);
    } else {
      ptx::path<"decode/sm80 inner tile">();
    }
    float rescale[2];
    rows.template update<0, true>(S[0], scale_log2(), rescale);
    if constexpr (features.token_scales) scale_columns<Finish::Rows::P_scale>(S, storage.scales[stage] + block_kv);
    gate.V_ready();
    if constexpr (config.producer_warp) clear_unseen_values(kv_begin, seen, V_smem(stage));
    add_values(S, rescale, V_smem(stage), are_first);
    gate.V_read();
  }

  /// The same with keys of 4 bits (turned.cuh), 32 of them at a time: the code stays short, and the scores take few
  /// registers.
  template <typename Gate>
  __device__ __forceinline__ void attend_turned(int kv_begin, int stage, bool are_first, const Gate& gate) {
    using Turned = decode::Turned<config>;
    constexpr int keys = tile::min(warp_keys, 32), key_tiles = keys / 16, row_tiles = Turned::row_tiles;
    constexpr float factor = tile::group_factor<code>;
    const tile::KeyRange full = storage.full;
    unsigned K = K_smem(stage), V = V_smem(stage), K_groups = scale_smem(stage), V_groups = K_groups;
#pragma unroll 1
    for (int first = 0; first < warp_keys; first += keys) {
      float S[key_tiles][row_tiles][4] = {};
#pragma unroll
      for (int m = 0; m < key_tiles; ++m)
        Turned::template multiply_keys<KTile>(S[m], Q_smem, K, K_groups, warp_key + 16 * m, lane);
      if (first + keys == warp_keys) gate.K_read();
      if (kv_begin < full.begin || kv_begin + keys > full.end) {
        ptx::path<"decode/sm80 edge tile">();
        score_turned<true>(S, args, storage.item, storage.sequence, kv_begin);
      } else if constexpr (!tile::Score<features>::linear) {
        ptx::path<"decode/sm80 inner tile with options">();
        score_turned<false>(S, args, storage.item, storage.sequence, kv_begin);
      } else {
        ptx::path<"decode/sm80 inner tile">();
      }
      float rescale[row_tiles][2];
      rows.template update<factor == 1 ? 0 : 8>(S, scale_log2(), rescale);
      if (first == 0) gate.V_ready();
      if (!(are_first && first == 0) && ptx::any(changes(rescale))) {
#pragma unroll
        for (int n = 0; n < sum_blocks; ++n) {
#pragma unroll
          for (int e = 0; e < 4; ++e) O[0][n][e] *= rescale[n / (sum_blocks / row_tiles)][e % 2];
        }
      }
#pragma unroll
      for (int m = 0; m < key_tiles; ++m) {
        unsigned P[row_tiles][2];
#pragma unroll
        for (int r = 0; r < row_tiles; ++r) {
#pragma unroll
          for (int half = 0; half < 2; ++half)
            P[r][half] = ptx::transpose_8x8(ptx::pack<type>(S[m][r][2 * half], S[m][r][2 * half + 1]));
        }
        Turned::template add_values<VTile>(O, P, V, V_groups, warp_key + 16 * m, lane);
      }
      kv_begin += keys;
      K += keys * KTile::row_bytes, V += keys * VTile::row_bytes;
      K_groups += keys * Turned::groups.key_bytes, V_groups += keys * Turned::groups.value_bytes;
    }
    gate.V_read();
  }

  template <int row_tiles>
  __device__ __forceinline__ static bool changes(const float (&rescale)[row_tiles][2]) {
    bool any = false;
#pragma unroll
    for (int r = 0; r < row_tiles; ++r) any = any || rescale[r][0] != 1 || rescale[r][1] != 1;
    return any;
  }

  /// The same in the fixed order: each warp computes the scores and probabilities of its own keys, and then the sums of
  /// its own columns over all keys.
  template <typename Gate>
  __device__ __forceinline__ void attend_in_order(int kv_begin, int position, int stage, const Gate& gate) {
    const tile::KeyRange seen = storage.item.seen, full = storage.full;
    const Order order{storage.order, lane, warp, position};
    Scores S{};
    const bool some_seen = kv_begin < seen.end && kv_begin + warp_keys > seen.begin;
    if (some_seen) multiply_keys(S, K_smem(stage));
    gate.K_read();
    if constexpr (features.token_scales) scale_columns<1>(S, storage.scales[stage]);
    if (kv_begin < full.begin || kv_begin + warp_keys > full.end) {
      ptx::path<"decode/sm80 ordered edge tile">();
      score_tile<true>(S, kv_begin);
    } else if constexpr (!tile::Score<features>::linear) {
      score_tile<false>(S, kv_begin);
    }
    // The references are the same in all warps, so all of them come here or none.
    if (ptx::any(rows.max[0] == -tile::infinity || rows.max[1] == -tile::infinity)) {
      order.share_maxima(S[0]);
      sync_consumers<config>();  // the maxima are written
      order.take_references(rows.max);
    }
    float rescale[2] = {1, 1};
    if (share_in_order(order, S, stage)) order.report();
    gate.V_ready();
    if constexpr (config.producer_warp) clear_unseen_values(kv_begin, seen, V_smem(stage));
    sync_consumers<config>();  // P and its sums are written, and unseen rows of V are clear
    if (order.is_suspect()) {
      ptx::path<"decode/sm80 raised reference">();
      order.share_maxima(S[0]);
      sync_consumers<config>();  // the maxima are written
      if (warp == 0) order.decide(rows.max, rows.sum);
      sync_consumers<config>();  // the references are written, and the sums are read
      order.raise(rows.max, scale_log2(), rescale);
      share_in_order(order, S, stage);
      sync_consumers<config>();  // P and its sums are written again
    }
    if (warp == 0) order.add_sums(rows.sum, rescale);
    add_columns(order, rescale, V_smem(stage));
    gate.V_read();
  }

  /// P and its sums of the warp's keys, for all warps. Returns whether a sum may be too large.
  __device__ __forceinline__ bool share_in_order(const Order& order, const Scores& S, int stage) const {
    Scores P;
#pragma unroll
    for (int n = 0; n < warp_keys / 8; ++n) {
#pragma unroll
      for (int e = 0; e < 4; ++e) P[0][n][e] = S[0][n][e];
    }
    const bool suspect = order.exponentiate(P[0], rows.max, scale_log2(), rows.sum);
    if constexpr (features.token_scales) scale_columns<Finish::Rows::P_scale>(P, storage.scales[stage] + block_kv);
    order.share_probabilities(P[0]);
    return suspect;
  }

  /// O = O * rescale + P V for the warp's columns and all keys of the tile.
  __device__ __forceinline__ void add_columns(const Order& order, const float (&rescale)[2], unsigned V) {
    if (Order::first_column(warp) >= dim_v) return;
    if (ptx::any(rescale[0] != 1 || rescale[1] != 1)) {
#pragma unroll
      for (int n = 0; n < Shape::own_columns / 8; ++n) {
#pragma unroll
        for (int e = 0; e < 4; ++e) O[0][n][e] *= rescale[e / 2];
      }
    }
    // ldmatrix takes the address of a row's first columns, so that Tile::step can go on from a multiple of 64.
    const unsigned V_address = tile::b_address<VTile>(V, 0, lane);
    const int first = Order::first_column(warp) / Order::unit;
    const auto P = [&](unsigned(&A)[4], int step) { order.take_probabilities(A, step); };
    if constexpr (narrow) {
      return add_codes<code, type, block_kv / 16>(
          O, P,
          [&](unsigned(&codes)[4], int c, int step) {
            ptx::ldmatrix_x4_trans(codes, VTile::step(V_address, 2 * (first + c)) + step * 16 * 128);
          },
          dim_v / 32 - first);
    }
    tile::multiply<type, block_kv / 16>(
        O, [&](unsigned(&A)[4], int, int step) { P(A, step); },
        [&](unsigned(&B)[4], int n, int step) {
          ptx::ldmatrix_x4_trans(B, VTile::step(V_address, 2 * (first + n)) + step * 16 * 128);
        },
        tile::min(Shape::own_columns / 16, dim_v / 16 - first));
  }

  /// A barrier of the warps that have the same keys but different rows.
  __device__ __forceinline__ void sync_rows() const {
    if constexpr (layout.row_warps == 1) {
      __syncwarp();
    } else {
      ptx::barrier_sync(barrier_rows + warp / layout.row_warps, 32 * layout.row_warps);
    }
  }

  /// A box may load rows of V that no query sees; a row without a box keeps what the stage held before. Such rows become
  /// zero, because a probability of 0 times NaN would be NaN. Warps that have the same keys share the work.
  __device__ __forceinline__ void clear_unseen_values(int kv_begin, const tile::KeyRange& seen, unsigned V) const {
    if (kv_begin >= seen.begin && kv_begin + warp_keys <= seen.end) return;
    ptx::path<"decode/sm90 unseen values">();
    constexpr int chunks = VTile::columns / 8 / layout.column_warps;  // that this warp reads
    for (int index = 2 * warp_row + lane; index < warp_keys * chunks; index += 32 * layout.row_warps) {
      const int row = index / chunks, j = kv_begin + row;
      if (j >= seen.begin && j < seen.end) continue;
      ptx::store_shared(V + column_warp * own_value_bytes + VTile::offset(warp_key + row, index % chunks),
                        ptx::Vector<unsigned, 4>{});
    }
    ptx::fence_async_shared();  // orders these stores before TMA writes the next box to the same place
    sync_rows();                // all rows are clear before any warp reads them
  }
};

}  // namespace flash_attention::decode
