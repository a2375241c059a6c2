#pragma once

// The idea:  softmax of one block runs under the products of another, in the same warpgroup and in the other one.
// From 13:   P V of a block is issued after Q K^T of the next; the warpgroups issue by ping-pong.
// It buys:   busier tensor cores with the same number of instructions.
// The limit: the running maximum: a comparison for every score, two shuffles and a rescaling of O for every block.

#include "ptx/barrier.cuh"
#include "ptx/fence.cuh"
#include "ptx/registers.cuh"
#include "ptx/shared.cuh"
#include "ptx/tma.cuh"
#include "ptx/wgmma.cuh"
#include "tile/copy.cuh"
#include "tile/mma.cuh"
#include "tile/softmax.cuh"
#include "tile/visibility.cuh"

namespace flash_attention {

using namespace abi;

template <ForwardConfig config>
struct Rung {
  static constexpr Features features = config.features;
  static constexpr Type type = features.dtype;
  using Element = ptx::Element<type>;
  static constexpr int block_q = config.block_q, block_kv = config.block_kv;
  static constexpr int wg_rows = 64, wg_threads = 128;  // of a warpgroup: the M of its products, and its four warps
  static constexpr int warpgroups = block_q / wg_rows;  // of consumers; one more is the producer
  // A thread enters with 168 registers (65536 over 384, in eights). What the producer gives up, the consumers take.
  static constexpr int load_registers = 40, attend_registers = 232;
  static constexpr int dim = tile::round_up(config.head_dim, 16), dim_v = tile::round_up(config.head_dim_v, 32);
  enum Map : int { map_Q = 0, map_K = 1, map_V = 2, map_O = 3 };       // entries of args.maps, made by the planner
  enum Barrier : int { barrier_warpgroup = 1, barrier_pingpong = 3 };  // named barriers, one for each warpgroup
  // Tiles of shared memory; the swizzle keeps eight rows that are read together in different banks.
  using QTile = tile::SwizzledTile<wg_rows, dim>;
  using OTile = tile::SwizzledTile<wg_rows, dim_v>;
  using KTile = tile::SwizzledTile<block_kv, dim>;
  using VTile = tile::SwizzledTile<block_kv, dim_v>;
  struct SharedStorage {
    union {
      QTile Q[warpgroups];
      OTile O[warpgroups];  // a warpgroup overwrites the queries that only it has read
    };
    KTile K[2];
    VTile V[2];
    ptx::Mbarrier Q_full, K_full[2], V_full[2];  // a tile has landed
    ptx::Mbarrier K_empty[2], V_empty[2];        // every warpgroup that reads it is done with it
  };
  // Of each 8 keys a lane has two neighbours in two rows.
  using Scores = float[block_kv / 8][4];
  using Packed = unsigned[block_kv / 16][4];

  const AttentionArgs& args;
  SharedStorage& storage;
  const tile::Sequence sequence;
  const int head_idx, q_begin;
  const int warpgroup;
  const int thread = threadIdx.x % wg_threads, lane = threadIdx.x % 32;
  const tile::LanePlace place{lane};
  const tile::Visibility<features> sight;
  // exp(x) is 2^(x log2 e): the hardware has 2^x, and the factor is folded into the scale.
  const float scale_log2 = args.scale * tile::log2_e;

  float O[dim_v / 8][4]{};
  // The state of the loop: maximum and sum of two rows, and their output, in fp32.
  tile::RowState rows;

  __device__ __forceinline__ Rung(const AttentionArgs& arguments, SharedStorage& shared, const tile::Sequence& s, int head,
                                  int first_query, int place_in_block)
      : args(arguments),
        storage(shared),
        sequence(s),
        head_idx(head),
        q_begin(first_query),
        warpgroup(place_in_block),
        sight(arguments, s, head) {}

  /// The row of the tile that this thread holds in the first half of each fragment. The row of the second half is 8 later.
  __device__ __forceinline__ int tile_row() const { return warpgroup * wg_rows + thread / 32 * 16 + place.row; }

  // -- loads: one thread issues, the copy engine copies ----------------------------------------------------------------

  template <typename Tile>
  __device__ __forceinline__ void load(Tile& to, ptx::Mbarrier& full, int map, int row, int head) const {
#pragma unroll
    for (int panel = 0; panel < Tile::panels; ++panel) {
      ptx::tma_load_4d(to.bytes + panel * Tile::panel_bytes, args.maps[map], full, panel * 64, row, head,
                       sequence.batch_idx);
    }
  }
  /// The queries of the block, for all warps.
  __device__ __forceinline__ void load_Q() const {
    ptx::mbarrier_arrive_expect_tx(storage.Q_full, warpgroups * sizeof(QTile));
    for (int w = 0; w < warpgroups; ++w) load(storage.Q[w], storage.Q_full, map_Q, q_begin + w * wg_rows, head_idx);
  }
  /// The producer runs ahead as long as there are empty stages. Stages start out empty: the phase
  /// before the first has phase 1 and counts as completed.
  __device__ __forceinline__ void load_tiles(const tile::TileRange& tiles) const {
    load_Q();
#pragma unroll 1
    for (int n = 0; n < tiles.end - tiles.begin; ++n) {
      const int row = (tiles.end - 1 - n) * block_kv, stage = n % 2, phase = n / 2 % 2;
      ptx::mbarrier_wait(storage.K_empty[stage], phase ^ 1);  // the stage's earlier K has been read
      ptx::mbarrier_arrive_expect_tx(storage.K_full[stage], sizeof(KTile));
      load(storage.K[stage], storage.K_full[stage], map_K, row, head_idx / args.group);
      ptx::mbarrier_wait(storage.V_empty[stage], phase ^ 1);  // and its V
      ptx::mbarrier_arrive_expect_tx(storage.V_full[stage], sizeof(VTile));
      load(storage.V[stage], storage.V_full[stage], map_V, row, head_idx / args.group);
    }
  }
  /// The products that read a stage are complete: the producer may fill it again.
  __device__ __forceinline__ void release(ptx::Mbarrier& empty) const {
    if (thread == 0) ptx::mbarrier_arrive(empty);
  }

  // -- products: issued together, waited for together -------------------------------------------------------------------

  /// Issues S = Q K^T. A descriptor counts in units of 16 bytes.
  __device__ __forceinline__ void multiply_keys(Scores& S, int stage) const {
    const auto Q = ptx::wgmma_descriptor(&storage.Q[warpgroup], 0, 1024);
    const auto K = ptx::wgmma_descriptor(&storage.K[stage], 0, 1024);
    ptx::wgmma_fence();  // softmax is done with these registers
#pragma unroll
    for (int step = 0; step < dim / 16; ++step) {
      const int panel = step / 4, inside = step % 4 * 32;
      ptx::wgmma_ss<type, block_kv, ptx::Major::k, ptx::Major::k>(flat(S), Q + (panel * QTile::panel_bytes + inside) / 16,
                                                                  K + (panel * KTile::panel_bytes + inside) / 16,
                                                                  step != 0);
    }
    ptx::wgmma_commit();
  }

  /// Issues O += P V, or O = P V.
  __device__ __forceinline__ void add_values(const Packed& P, int stage, bool accumulate) {
    const auto V = ptx::wgmma_descriptor(&storage.V[stage], VTile::panel_bytes, 1024);
    ptx::wgmma_fence();  // O and P have been written by ordinary instructions
#pragma unroll
    for (int step = 0; step < block_kv / 16; ++step) {
      ptx::wgmma_rs<type, dim_v, ptx::Major::mn>(flat(O), P[step], V + step * 16 * 128 / 16, accumulate || step != 0);
    }
    ptx::wgmma_commit();
  }

  /// wgmma's accumulator has the layout of mma.sync's: the same registers as one array.
  template <int blocks>
  __device__ __forceinline__ static float (&flat(float (&fragment)[blocks][4]))[4 * blocks] {
    return reinterpret_cast<float(&)[4 * blocks]>(fragment);
  }

  // -- ping-pong ------------------------------------------------------------------------------------------------

  /// Waits until the warpgroup before this one has issued its products. Both arrive at the barrier, one waits.
  __device__ __forceinline__ void pingpong_wait() const { ptx::barrier_sync(barrier_pingpong + warpgroup, 2 * wg_threads); }
  __device__ __forceinline__ void pingpong_signal() const {
    ptx::barrier_arrive(barrier_pingpong + (warpgroup + 1) % warpgroups, 2 * wg_threads);
  }

  // -- softmax ----------------------------------------------------------------------------------------------------------

  /// Sets the scores of hidden keys to -inf.
  __device__ __forceinline__ void mask(Scores& S, int kv_begin) const {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int i = q_begin + tile_row() + 8 * half;
      const tile::KeyRange range = sight.keys_of(i);
#pragma unroll
      for (int n = 0; n < block_kv / 8; ++n) {
#pragma unroll
        for (int e = 2 * half; e < 2 * half + 2; ++e) {
          if (!sight.visible(range, i, kv_begin + 8 * n + place.column + e % 2)) S[n][e] = -tile::infinity;
        }
      }
    }
  }

  /// S becomes P; O must be multiplied by `rescale`.
  __device__ __forceinline__ void softmax(Scores& S, int kv_begin, float (&rescale)[2]) {
    if (!sight.template all_visible<block_q, block_kv>(q_begin, kv_begin)) mask(S, kv_begin);
    rows.update(S, scale_log2, rescale);
  }
  /// O was summed relative to the old maximum.
  __device__ __forceinline__ void rescale_O(const float (&rescale)[2]) {
#pragma unroll
    for (int n = 0; n < dim_v / 8; ++n) {
#pragma unroll
      for (int e = 0; e < 4; ++e) O[n][e] *= rescale[e / 2];
    }
  }
  /// P, rounded, as the left operand of P V. The operand has the layout of the accumulator.
  __device__ __forceinline__ static void pack(Packed& P, const Scores& S) {
#pragma unroll
    for (int step = 0; step < block_kv / 16; ++step) tile::pack_a<type>(P[step], S[2 * step], S[2 * step + 1]);
  }

  // -- the loop ---------------------------------------------------------------------------------------------------------

  __device__ __forceinline__ void attend(const tile::TileRange& tiles) {
    Scores S;
    Packed P;
    float rescale[2];
    int n = 0, stage = 0, phase = 0, tile_idx = tiles.end - 1;
    if (warpgroup == warpgroups - 1) pingpong_signal();  // warpgroup 0 issues first
    // The queries and the last K have landed.
    ptx::mbarrier_wait(storage.Q_full, 0);
    ptx::mbarrier_wait(storage.K_full[stage], phase);
    pingpong_wait();
    multiply_keys(S, stage);
    pingpong_signal();
    ptx::wgmma_wait<0>();  // S is complete
    ptx::wgmma_pin(flat(S));
    release(storage.K_empty[stage]);
    softmax(S, tile_idx * block_kv, rescale);
    pack(P, S);
    ptx::wgmma_pin(P);

    auto visit = [&] {
      const int V_stage = stage, V_phase = phase;  // of the block before
      ++n, stage = n % 2, phase = n / 2 % 2;
      ptx::mbarrier_wait(storage.K_full[stage], phase);  // K has landed
      pingpong_wait();
      multiply_keys(S, stage);
      ptx::mbarrier_wait(storage.V_full[V_stage], V_phase);  // V of the block before has landed
      add_values(P, V_stage, n > 1);
      pingpong_signal();
      ptx::wgmma_wait<1>();  // S is complete; P V may still run
      ptx::wgmma_pin(flat(S));
      release(storage.K_empty[stage]);
      softmax(S, tile_idx * block_kv, rescale);
      ptx::wgmma_wait<0>();  // P V is done: O and P may be read and written again
      ptx::wgmma_pin(flat(O));
      ptx::wgmma_pin(P);
      release(storage.V_empty[V_stage]);
      rescale_O(rescale);
      pack(P, S);
      ptx::wgmma_pin(P);
    };
    --tile_idx;
#pragma unroll 1
    for (; tile_idx >= tiles.begin; --tile_idx) visit();

    ptx::mbarrier_wait(storage.V_full[stage], phase);  // the first V has landed
    pingpong_wait();
    add_values(P, stage, n > 0);
    pingpong_signal();
    ptx::wgmma_wait<0>();  // O is complete
    ptx::wgmma_pin(flat(O));
    release(storage.V_empty[stage]);
    if (warpgroup == 0) pingpong_wait();  // no arrival is left over
  }

  /// Writes lse, and O through the warpgroup's own rows of shared memory.
  __device__ __forceinline__ void finish() {
    const unsigned O_smem = ptx::shared_address(&storage.O[warpgroup]);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int row = tile_row() + 8 * half, i = q_begin + row;
      float lse;
      const float factor = rows.finish(half, scale_log2, -tile::infinity, lse);
      // Four lanes hold a row: one of them writes its lse.
      if (args.lse != nullptr && place.column == 0 && i < sequence.rows_q) {
        args.lse[tile::statistics_offset<features>(args, sequence, head_idx) + i] = lse;
      }
#pragma unroll
      for (int n = 0; n < dim_v / 8; ++n) {
        // Two neighbours of a row, rounded, fill one register.
        ptx::store_shared(O_smem + OTile::offset(row % wg_rows, n) + 2 * place.column,
                          ptx::pack<type>(O[n][2 * half] * factor, O[n][2 * half + 1] * factor));
      }
    }
    ptx::fence_async_shared();                                     // the writes are visible to TMA
    ptx::barrier_sync(barrier_warpgroup + warpgroup, wg_threads);  // the whole warpgroup has written
    if (thread == 0) {
#pragma unroll
      for (int panel = 0; panel < OTile::panels; ++panel) {
        ptx::tma_store_4d(args.maps[map_O], storage.O[warpgroup].bytes + panel * OTile::panel_bytes, panel * 64,
                          q_begin + warpgroup * wg_rows, head_idx, sequence.batch_idx);
      }
      ptx::bulk_commit();
      ptx::bulk_wait<0>();  // the store is complete before the block ends
    }
  }
};

template <ForwardConfig config>
__device__ __forceinline__ void attention(const AttentionArgs& args) {
  using Kernel = Rung<config>;
  auto& storage = ptx::shared_storage<typename Kernel::SharedStorage>();
  // The tile of queries, the head and the sequence that this block computes.
  const auto block = tile::query_block(blockIdx.x, tile::ceil_div(args.seq_q, config.block_q), args.heads_q);
  const tile::Sequence sequence = tile::make_sequence<config.features>(args, block.batch_idx);
  if (threadIdx.x == 0) {
    ptx::mbarrier_init(storage.Q_full, 1);
    for (int stage = 0; stage < 2; ++stage) {
      ptx::mbarrier_init(storage.K_full[stage], 1);
      ptx::mbarrier_init(storage.V_full[stage], 1);
      ptx::mbarrier_init(storage.K_empty[stage], Kernel::warpgroups);
      ptx::mbarrier_init(storage.V_empty[stage], Kernel::warpgroups);
    }
    ptx::mbarrier_init_fence();  // the copy engine sees the barriers
  }
  __syncthreads();  // all threads see them, too

  const int q_begin = block.tile_idx * config.block_q;
  const int warpgroup = ptx::shuffle(static_cast<int>(threadIdx.x) / Kernel::wg_threads, 0);  // the compiler knows: uniform
  // One state for each thread; registers hold it, since everything is inlined.
  Kernel kernel(args, storage, sequence, block.head_idx, q_begin, warpgroup - 1);
  // Tiles of keys that some query of the block sees.
  const auto tiles = kernel.sight.template key_tiles<config.block_q, config.block_kv>(q_begin);
  if (warpgroup == 0) {
    ptx::registers_decrease<Kernel::load_registers>();
    if (threadIdx.x == 0 && tiles.begin < tiles.end) kernel.load_tiles(tiles);
  } else {
    ptx::registers_increase<Kernel::attend_registers>();
    if (tiles.begin < tiles.end) kernel.attend(tiles);
    kernel.finish();
  }
}

}  // namespace flash_attention
