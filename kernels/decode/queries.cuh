#pragma once

#include "decode/consumer_shape.cuh"
#include "tile/mma.cuh"

// Q of an item of a decode kernel: from memory to shared memory, from there to registers where they suffice.

namespace flash_attention::decode {

template <ForwardConfig config>
struct Queries : ConsumerShape<config> {
  using Shape = ConsumerShape<config>;
  using Shape::features, Shape::layout, Shape::threads, Shape::warp_keys, Shape::dim, Shape::narrow, Shape::q_steps,
      Shape::Q_in_registers;
  using typename Shape::Element, typename Shape::QTile, typename Shape::SharedStorage;

  const AttentionArgs& args;
  SharedStorage& storage;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int warp_row = warp % layout.row_warps * 16;
  const int warp_key = warp / layout.row_warps % layout.tile_warps * warp_keys;
  const tile::LanePlace place{lane};
  const unsigned Q_smem = ptx::shared_address(&storage.Q);
  unsigned Q[Q_in_registers ? q_steps : 1][4];

  __device__ __forceinline__ Queries(const AttentionArgs& arguments, SharedStorage& shared)
      : args(arguments), storage(shared) {}

  static constexpr int chunks = dim / 8;
  using Chunk = ptx::Vector<unsigned, 4>;
  /// Q of an item is prefetched while the item before ends, if registers allow it.
  static constexpr int own_chunks = tile::ceil_div(QTile::rows * chunks, threads);
  static constexpr bool fetches_early = config.producer_warp && own_chunks <= 2 && tile::Score<features>::linear;
  Chunk fetched[fetches_early ? own_chunks : 1];

  __device__ __forceinline__ void fetch_Q(const Item<config>& item) {
    const tile::Sequence sequence = tile::make_sequence<features>(args, item.batch_idx);
#pragma unroll
    for (int own = 0; own < own_chunks; ++own) fetched[own] = chunk_of(item, sequence, threadIdx.x + own * threads);
  }

  /// Q of an item to every warp. The barrier at the end of Finish frees its tile, and what it reads. same_rows: the rows
  /// are those of the item before, of the same sequence and tokens.
  __device__ __forceinline__ void load_Q(const Item<config>& item, bool same_rows) {
    const tile::Sequence sequence = tile::make_sequence<features>(args, item.batch_idx);
    if (threadIdx.x == 0) storage.item = item;
    if (threadIdx.x == 0 && !same_rows) {  // of another sequence, or other tokens
      const Tokens tokens = Item<config>::tokens_of(sequence, item.row_tile);
      const tile::Score<features> score(args, sequence, item.kv_head_idx * config.group);
      storage.sequence = sequence;
      storage.full = score.keys_of_all(tokens.begin, tokens.end);
    }
    if constexpr (fetches_early) {
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

 private:
  /// Eight columns of a row; rows that do not exist are zero.
  __device__ __forceinline__ Chunk chunk_of(const Item<config>& item, const tile::Sequence& sequence, int index) const {
    const int row = index / chunks, chunk = index % chunks, packed = item.row_tile * config.block_q + row;
    const int query = packed / config.group, head_idx = item.kv_head_idx * config.group + packed % config.group;
    if (row >= config.block_q || query >= sequence.rows_q || chunk * 8 >= config.head_dim) return {};
    const auto* from = tile::query_rows<const Element, features>(args.Q, sequence, head_idx).row(query) + chunk * 8;
    return ptx::load_readonly(reinterpret_cast<const Chunk*>(from));
  }

  __device__ __forceinline__ void read_Q(unsigned (&A)[4], int step) const {
    ptx::ldmatrix_x4(A, QTile::step(tile::a_address<QTile>(Q_smem, warp_row, lane), 2 * step));
  }

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
};

}  // namespace flash_attention::decode
