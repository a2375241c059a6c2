#pragma once

// The idea:  a block stays on its SM and takes tile after tile, so that its pipeline never runs empty.
// From 15:   Q has two stages, O its own buffer; under a causal mask a long tile and a short one make a pair.
// It buys:   no idle prologues and epilogues: most where tiles are short, as under a causal mask.
// The limit: exponentials at head_dim 64, power at 128. forward/sm90 is this kernel with every option.

#include "ladder/parts/tile_schedule.cuh"
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
  enum Map : int { map_Q = 0, map_K = 1, map_V = 2, map_O = 3 };  // entries of args.maps, made by the planner
  // Named barriers. The first two are the first of one for each warpgroup.
  enum Barrier : int { barrier_warpgroup = 1, barrier_pingpong = 3, barrier_attempt = 5 };
  // Tiles of shared memory; the swizzle keeps eight rows that are read together in different banks.
  using QTile = tile::SwizzledTile<wg_rows, dim>;
  using OTile = tile::SwizzledTile<wg_rows, dim_v>;
  using KTile = tile::SwizzledTile<block_kv, dim>;
  using VTile = tile::SwizzledTile<block_kv, dim_v>;
  static constexpr int max_marks = 256;  // the last one stands for all tiles that are left over
  struct SharedStorage {
    QTile Q[2][warpgroups];
    OTile O[warpgroups];  // in flight to memory while the next tile is computed
    KTile K[2];
    VTile V[2];
    ptx::Mbarrier Q_full[2], K_full[2], V_full[2];     // a tile has landed
    ptx::Mbarrier Q_empty[2], K_empty[2], V_empty[2];  // every warpgroup that reads it is done with it
    bool retry[max_marks];                             // tiles whose reference was too low for some row
    bool retry_some;
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
  int& num_blocks;  // so far: of the producer, or of this warpgroup's K
  int& num_tiles;

  __device__ __forceinline__ Rung(const AttentionArgs& arguments, SharedStorage& shared, const tile::Sequence& s, int head,
                                  int first_query, int place_in_block, Progress& progress)
      : args(arguments),
        storage(shared),
        sequence(s),
        head_idx(head),
        q_begin(first_query),
        warpgroup(place_in_block),
        sight(arguments, s, head),
        num_blocks(progress.blocks),
        num_tiles(progress.tiles) {}

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
  __device__ __forceinline__ void load_Q() {
    const int stage = num_tiles % 2, phase = num_tiles / 2 % 2;
    ptx::mbarrier_wait(storage.Q_empty[stage], phase ^ 1);  // the queries of the tile before the last have been read
    ptx::mbarrier_arrive_expect_tx(storage.Q_full[stage], warpgroups * sizeof(QTile));
    for (int w = 0; w < warpgroups; ++w) {
      load(storage.Q[stage][w], storage.Q_full[stage], map_Q, q_begin + w * wg_rows, head_idx);
    }
    ++num_tiles;
  }
  /// The producer warp runs ahead as long as there are empty stages. Stages start out empty: the phase before
  /// the first has phase 1 and counts as completed.
  __device__ __forceinline__ void load_tiles(const tile::TileRange& tiles) {
#pragma unroll 1
    for (int tile_idx = tiles.end - 1; tile_idx >= tiles.begin; --tile_idx, ++num_blocks) {
      const int row = tile_idx * block_kv, stage = num_blocks % 2, phase = num_blocks / 2 % 2;
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
    const auto Q = ptx::wgmma_descriptor(&storage.Q[num_tiles % 2][warpgroup], 0, 1024);
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
  /// The same for a block that every query sees completely: the maximum stays. P may exceed 1, which costs no precision.
  __device__ __forceinline__ void softmax_interior(Scores& S) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const float reference = rows.max[half] == -tile::infinity ? 0 : rows.max[half] * scale_log2;
#pragma unroll
      for (int n = 0; n < block_kv / 8; ++n) {
#pragma unroll
        for (int e = 2 * half; e < 2 * half + 2; ++e) {
          S[n][e] = ptx::exp2(ptx::fma(S[n][e], scale_log2, -reference));
          rows.sum[half] += S[n][e];
        }
      }
    }
  }
  /// Whether the reference was high enough. A row sum bounds every P of its row, so no P has left the range of the types.
  __device__ __forceinline__ bool sound() const {
    constexpr float highest = type == Type::float16 ? 65504.0f : 1099511627776.0f;  // the largest, 2^40
    bool result = true;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const float sum = tile::reduce_quad(rows.sum[half], [](float a, float b) { return a + b; });
      const bool empty = sum == 0 && rows.max[half] == -tile::infinity;
      result = result && (empty || (sum >= 0.5f && sum < highest));
    }
    return result;
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

  /// All blocks of the tile; those before `interior_end` keep the maximum that the others have found.
  __device__ __forceinline__ void attend(const tile::TileRange& tiles, int interior_end) {
    Scores S;
    Packed P;
    float rescale[2];
    rows = {};
    int n = 0, stage = num_blocks % 2, phase = num_blocks / 2 % 2, tile_idx = tiles.end - 1;
    // The queries and the last K have landed.
    ptx::mbarrier_wait(storage.Q_full[num_tiles % 2], num_tiles / 2 % 2);
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

    auto visit = [&]<bool interior>() {
      const int V_stage = stage, V_phase = phase;  // of the block before
      ++n, ++num_blocks, stage = num_blocks % 2, phase = num_blocks / 2 % 2;
      ptx::mbarrier_wait(storage.K_full[stage], phase);  // K has landed
      pingpong_wait();
      multiply_keys(S, stage);
      ptx::mbarrier_wait(storage.V_full[V_stage], V_phase);  // V of the block before has landed
      add_values(P, V_stage, n > 1);
      pingpong_signal();
      ptx::wgmma_wait<1>();  // S is complete; P V may still run
      ptx::wgmma_pin(flat(S));
      release(storage.K_empty[stage]);
      if constexpr (interior) {
        softmax_interior(S);
      } else {
        softmax(S, tile_idx * block_kv, rescale);
      }
      ptx::wgmma_wait<0>();  // P V is done: O and P may be read and written again
      ptx::wgmma_pin(flat(O));
      ptx::wgmma_pin(P);
      release(storage.V_empty[V_stage]);
      if constexpr (!interior) rescale_O(rescale);
      pack(P, S);
      ptx::wgmma_pin(P);
    };
    --tile_idx;
#pragma unroll 1
    for (; tile_idx >= interior_end; --tile_idx) visit.template operator()<false>();
#pragma unroll 1
    for (; tile_idx >= tiles.begin; --tile_idx) visit.template operator()<true>();

    release(storage.Q_empty[num_tiles++ % 2]);
    ptx::mbarrier_wait(storage.V_full[stage], phase);  // the first V has landed
    pingpong_wait();
    add_values(P, stage, n > 0);
    pingpong_signal();
    ptx::wgmma_wait<0>();  // O is complete
    ptx::wgmma_pin(flat(O));
    release(storage.V_empty[stage]);
    ++num_blocks;
  }

  /// Every query of the tile sees all keys of the blocks before this one. The first query sees the fewest keys.
  __device__ __forceinline__ int interior_end() const { return tile::max(sight.keys_of(q_begin).end, 0) / block_kv; }

  /// Writes lse, and O through the warpgroup's buffer. The store is waited for when the buffer is needed again.
  __device__ __forceinline__ void finish() {
    const unsigned O_smem = ptx::shared_address(&storage.O[warpgroup]);
    if (thread == 0) ptx::bulk_wait_read<0>();                     // the tile before has been read
    ptx::barrier_sync(barrier_warpgroup + warpgroup, wg_threads);  // so all may write the buffer
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
    }
  }
};

template <ForwardConfig config>
__device__ __forceinline__ void attention(const AttentionArgs& args) {
  using Kernel = Rung<config>;
  auto& storage = ptx::shared_storage<typename Kernel::SharedStorage>();
  if (threadIdx.x == 0) {
    storage.retry_some = false;
    for (int stage = 0; stage < 2; ++stage) {
      ptx::mbarrier_init(storage.Q_full[stage], 1);
      ptx::mbarrier_init(storage.K_full[stage], 1);
      ptx::mbarrier_init(storage.V_full[stage], 1);
      ptx::mbarrier_init(storage.Q_empty[stage], Kernel::warpgroups);
      ptx::mbarrier_init(storage.K_empty[stage], Kernel::warpgroups);
      ptx::mbarrier_init(storage.V_empty[stage], Kernel::warpgroups);
    }
    ptx::mbarrier_init_fence();  // the copy engine sees the barriers
  }
  for (int i = threadIdx.x; i < Kernel::max_marks; i += config.num_warps * 32) storage.retry[i] = false;
  __syncthreads();  // all threads see them, too

  const int warpgroup = ptx::shuffle(static_cast<int>(threadIdx.x) / Kernel::wg_threads, 0);  // the compiler knows: uniform
  // Without the idle warps of the producer.
  constexpr int attempt_threads = Kernel::warpgroups * Kernel::wg_threads + 32;
  Progress progress;
  // The second attempt is for the tiles that the first has marked; there every block raises the maximum.
  if (warpgroup == 0) {
    ptx::registers_decrease<Kernel::load_registers>();
    if (threadIdx.x >= 32) return;
#pragma unroll 1
    for (int attempt = 0; attempt == 0 || (attempt == 1 && storage.retry_some); ++attempt) {
      if (threadIdx.x == 0) {
        for_each_tile<config>(args, [&](int index, int head, int batch, int q_begin) {
          if (attempt == 1 && !storage.retry[tile::min(index, Kernel::max_marks - 1)]) return;
          Kernel kernel(args, storage, tile::make_sequence<config.features>(args, batch), head, q_begin, 0, progress);
          const auto tiles = kernel.sight.template key_tiles<config.block_q, config.block_kv>(q_begin);
          if (tiles.begin == tiles.end) return;
          kernel.load_Q();
          kernel.load_tiles(tiles);
        });
      }
      __syncwarp();  // the other lanes wait for the one that loads; the emulator does not miss it: its barrier waits for
                     // them, too
      ptx::barrier_sync_apart(Kernel::barrier_attempt, attempt_threads);  // all tiles are done and judged
    }
  } else {
    ptx::registers_increase<Kernel::attend_registers>();
    if (warpgroup == Kernel::warpgroups)
      ptx::barrier_arrive(Kernel::barrier_pingpong, 2 * Kernel::wg_threads);  // see pingpong_signal
#pragma unroll 1
    for (int attempt = 0; attempt == 0 || (attempt == 1 && ptx::shuffle(static_cast<int>(storage.retry_some), 0));
         ++attempt) {
      for_each_tile<config>(args, [&](int index, int head, int batch, int q_begin) {
        bool& retry = storage.retry[tile::min(index, Kernel::max_marks - 1)];
        if (attempt == 1 && !ptx::shuffle(static_cast<int>(retry), 0)) return;  // the compiler knows: uniform
        Kernel kernel(args, storage, tile::make_sequence<config.features>(args, batch), head, q_begin, warpgroup - 1,
                      progress);
        const auto tiles = kernel.sight.template key_tiles<config.block_q, config.block_kv>(q_begin);
        if (tiles.begin < tiles.end) kernel.attend(tiles, attempt == 0 ? kernel.interior_end() : tiles.begin);
        if (attempt == 0 && ptx::any(!kernel.sound())) retry = storage.retry_some = true;
        kernel.finish();
      });
      if (threadIdx.x % Kernel::wg_threads == 0) ptx::bulk_wait<0>();     // stores are complete before the next attempt
      ptx::barrier_sync_apart(Kernel::barrier_attempt, attempt_threads);  // all tiles are done and judged
    }
    if (warpgroup == 1) ptx::barrier_sync(Kernel::barrier_pingpong, 2 * Kernel::wg_threads);  // no arrival is left over
  }
}

}  // namespace flash_attention
