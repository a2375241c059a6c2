#pragma once

// Key masses (forward/key_mass.cuh) with wgmma and cp.async: sm_90, 16-bit types, heads of up to 128 columns.
//
// A warpgroup owns 128 keys of a query head, two tiles of 64, and a thread block those of two or four warpgroups. Queries
// arrive in tiles of 128, two in flight:
//
//   for each tile of queries that see some of the keys:
//     wait for it;  start the next one
//     issue S0 = K0 Q^T and S1 = K1 Q^T of its first 64 queries
//     wait for S0;  mass0 += 2^(S0 - lse);  issue S0 of its other 64 queries
//     wait for S1;  mass1 += 2^(S1 - lse);  issue S1 of them
//     wait for S0;  mass0 += ...;  wait for S1;  mass1 += ...
//
// So exponentials run under a product, and no product is in flight at the end of an iteration, where the compiler would
// serialise all of them. Each block adds in a fixed order, so every run has the same bits.

#include "forward/key_mass_sm80.cuh"
#include "ptx/fence.cuh"
#include "ptx/wgmma.cuh"
#include "tile/descriptor.cuh"

namespace flash_attention {

template <ForwardConfig config>
struct KeyMassSm90 {
  static constexpr Features features = config.features;
  static constexpr Type type = features.dtype;
  static constexpr int block_q = config.block_q, block_kv = config.block_kv, threads = 32 * config.num_warps;
  static constexpr int dim = tile::round_up(config.head_dim, 16), steps = dim / 16;
  static constexpr int queries = 64;  // of a product
  using Element = ptx::Element<type>;
  using KTile = tile::SwizzledTile<block_kv, dim>;
  using QTile = tile::SwizzledTile<block_q, dim>;
  using Scores = float[1][queries / 8][4];
  static_assert(block_kv == 32 * config.num_warps && config.num_warps % 4 == 0 && block_q == 2 * queries);

  struct SharedStorage {
    KTile K;
    QTile Q[2];
    float minus_lse[2][block_q];  // in powers of two; -inf for a row that has no probabilities
    tile::Sequence sequence;      // here it takes no registers
    int head_idx;
  };

  const AttentionArgs& args;
  SharedStorage& storage;
  const tile::Sequence& sequence;
  const int& head_idx;
  const int kv_begin;
  const int thread = threadIdx.x, lane = threadIdx.x % 32;
  const int warpgroup_row;  // first of the warpgroup's 128 keys in the block
  const tile::LanePlace place{lane};
  const tile::Score<features> score;

  float mass[2][1][2]{};

  __device__ __forceinline__ KeyMassSm90(const AttentionArgs& arguments, SharedStorage& shared, int first_key)
      : args(arguments),
        storage(shared),
        sequence(shared.sequence),
        head_idx(shared.head_idx),
        kv_begin(first_key),
        warpgroup_row(ptx::shuffle(static_cast<int>(threadIdx.x) / 128 * 128, 0)),  // known to be uniform
        score(arguments, shared.sequence, shared.head_idx) {}

  /// The row of a tile's first key of this warp.
  __device__ __forceinline__ int warp_row(int m) const { return warpgroup_row + 64 * m + thread / 32 % 4 * 16; }

  __device__ __forceinline__ void load_K() {
    auto from = tile::key_rows<const Element, features>(args.K, sequence, head_idx / args.group);
    from.count = sequence.visible_kv;
    tile::copy_tile_async<threads, config.head_dim, KTile>(ptx::shared_address(&storage.K), from.from(kv_begin), thread);
  }
  __device__ __forceinline__ void load_Q(int tile_idx, int stage) {
    auto from = tile::query_rows<const Element, features>(args.Q, sequence, head_idx);
    from.count = sequence.len_q;
    tile::copy_tile_async<threads, config.head_dim, QTile>(ptx::shared_address(&storage.Q[stage]),
                                                           from.from(tile_idx * block_q), thread);
  }
  __device__ __forceinline__ float minus_lse_in(int tile_idx) const {
    const float* const lse = args.lse + tile::statistics_offset<features>(args, sequence, head_idx);
    return minus_lse_of(lse, thread < block_q ? tile_idx * block_q + thread : score.sight.len_q, score.sight.len_q);
  }

  __device__ __forceinline__ static void await_copies() {
    ptx::copy_async_wait<0>();
    ptx::fence_async_shared();  // wgmma reads by another proxy
    __syncthreads();
  }

  __device__ __forceinline__ static float (&flat(Scores& S))[queries / 2] {
    return reinterpret_cast<float(&)[queries / 2]>(S);
  }

  /// Issues S = K Q^T of 64 queries.
  __device__ __forceinline__ void issue(Scores& S, int m, int stage, int first) const {
    const tile::Descriptor<true> Q(ptx::wgmma_descriptor(storage.Q[stage].bytes, 0, 1024));
    const tile::Descriptor<true> keys(ptx::wgmma_descriptor(storage.K.bytes, 0, 1024));
    ptx::wgmma_fence();  // ordinary instructions have used these registers
#pragma unroll
    for (int step = 0; step < steps; ++step) {
      const int panel = step / 4, inside = step % 4 * 32;
      ptx::wgmma_ss<type, queries, ptx::Major::k, ptx::Major::k>(
          flat(S), keys.at((warpgroup_row + 64 * m) * 128 + panel * KTile::panel_bytes + inside),
          Q.at(first * 128 + panel * QTile::panel_bytes + inside), step != 0);
    }
    ptx::wgmma_commit();
  }
  template <int pending>
  __device__ __forceinline__ static void await(Scores& S) {
    ptx::wgmma_wait<pending>();
    ptx::wgmma_pin(flat(S));
  }

  template <bool some_hidden>
  __device__ __forceinline__ void add(const Scores& S, int m, int q_begin, int stage, int first) {
    const int shift = ptx::hide_from_compiler(first);  // addresses are not kept in registers
    add_masses<some_hidden, 64>(mass[m], S, score, storage.minus_lse[stage] + shift, q_begin + shift,
                                kv_begin + warp_row(m) + place.row, place.column);
  }
  /// Adds one tile of queries, of which all see all keys.
  __device__ __forceinline__ void add_inner_tile(int q_begin, int stage) {
    Scores S0, S1;
    issue(S0, 0, stage, 0);
    issue(S1, 1, stage, 0);
    await<1>(S0);
    add<false>(S0, 0, q_begin, stage, 0);
    issue(S0, 0, stage, queries);
    await<1>(S1);
    add<false>(S1, 1, q_begin, stage, 0);
    issue(S1, 1, stage, queries);
    await<1>(S0);
    add<false>(S0, 0, q_begin, stage, queries);
    await<0>(S1);
    add<false>(S1, 1, q_begin, stage, queries);
  }
  /// The same for any tile, one product after another: what is hidden takes registers.
  __device__ __forceinline__ void add_edge_tile(int q_begin, int stage) {
#pragma unroll 1
    for (int first = 0; first < block_q; first += queries) {
#pragma unroll
      for (int m = 0; m < 2; ++m) {
        Scores S;
        issue(S, m, stage, first);
        await<0>(S);
        add<true>(S, m, q_begin, stage, first);
      }
    }
  }

  /// The next tile of queries that see some of the keys, from tile_idx on; or tiles.end.
  __device__ __forceinline__ int visible_tile(int tile_idx, const tile::TileRange& tiles) const {
    if constexpr (tile::Visibility<features>::skips_tiles) {
      while (tile_idx < tiles.end && score.sight.template masks_hide<block_q, block_kv>(tile_idx * block_q, kv_begin)) ++tile_idx;
    }
    return tile_idx;
  }

  __device__ __forceinline__ void attend(const tile::TileRange& tiles) {
    int tile_idx = visible_tile(tiles.begin, tiles);
    if (tile_idx >= tiles.end) return;
    load_K();
    load_Q(tile_idx, 0);
    ptx::copy_async_commit();
    if (thread < block_q) storage.minus_lse[0][thread] = minus_lse_in(tile_idx);
    await_copies();  // K, the first queries and their lse have landed
#pragma unroll 1
    for (int stage = 0; tile_idx < tiles.end; stage ^= 1) {
      const int next_idx = visible_tile(tile_idx + 1, tiles), q_begin = tile_idx * block_q;
      float next_lse = 0;
      if (next_idx < tiles.end) {
        load_Q(next_idx, stage ^ 1);
        next_lse = minus_lse_in(next_idx);
      }
      ptx::copy_async_commit();
      if (score.sight.template all_visible<block_q, 128>(q_begin, kv_begin + warpgroup_row)) {
        ptx::path<"forward/key_mass_sm90 inner tile">();
        add_inner_tile(q_begin, stage);
      } else {
        ptx::path<"forward/key_mass_sm90 edge tile">();
        add_edge_tile(q_begin, stage);
      }
      if (thread < block_q) storage.minus_lse[stage ^ 1][thread] = next_lse;
      await_copies();  // the next queries have landed, and every warp is done with these
      tile_idx = next_idx;
    }
  }

  __device__ __forceinline__ void write() const {
    float* const to = args.key_mass + tile::key_mass_offset<features>(args, sequence, head_idx);
    const int fresh = ptx::hide_from_compiler(thread);  // places are not kept in registers for this
    const tile::LanePlace its_place{fresh % 32};
    const int first = kv_begin + fresh / 128 * 128 + fresh / 32 % 4 * 16 + its_place.row;
#pragma unroll
    for (int m = 0; m < 2; ++m) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const float sum = tile::reduce_quad(mass[m][0][half], [](float a, float b) { return a + b; });
        const int j = first + 64 * m + 8 * half;
        if (its_place.column == 0 && j < sequence.rows_kv) to[j] = sum;
      }
    }
  }
};

template <ForwardConfig config>
__device__ __forceinline__ void forward_key_mass_sm90(const AttentionArgs& args) {
  using Kernel = KeyMassSm90<config>;
  auto& storage = ptx::shared_storage<typename Kernel::SharedStorage>();
  tile::clear_key_mass_tail<config>(args, threadIdx.x, Kernel::threads);
  const auto block = tile::key_block(blockIdx.x, tile::ceil_div(args.seq_kv, config.block_kv), args.heads_q);
  const tile::Sequence sequence = tile::make_sequence<config.features>(args, block.batch_idx);
  const int kv_begin = block.tile_idx * config.block_kv;
  if (kv_begin >= sequence.rows_kv) return;
  if (threadIdx.x == 0) storage.sequence = sequence, storage.head_idx = block.head_idx;
  __syncthreads();  // they are there
  Kernel kernel(args, storage, kv_begin);
  const auto tiles = kernel.score.sight.template query_tiles<config.block_q, config.block_kv>(kv_begin);
  if (tiles.begin < tiles.end) kernel.attend(tiles);
  kernel.write();
}

}  // namespace flash_attention
