#pragma once

// Forward mode with wgmma: sm_90, 16-bit types, heads of up to 128 columns. Rows, scores, softmax and results are those of
// tangent/sm80: a warpgroup has 64 queries, and its accumulators and A operands are those of four warps of 16. K, V and
// their tangents are read by descriptors. Widths are filled up with zeros to 64 or 128.
//
// A thread block is one or two warpgroups that compute, and one that copies (cp.async) into a ring of stages, K and V
// separately. A warpgroup's products of values are one KV block late, so that they run under the softmax:
//
//   for each KV block n:
//     issue S = Q K(n)^T, S. = Q. K(n)^T + Q K.(n)^T                           issue_scores
//     issue O += P V(n - 1), A += W V(n - 1) + P V.(n - 1)                     issue_values
//     wait for S and S.;  P, W of block n                                      tangent/sm80
//     wait for O and A;  move them if a maximum has risen;  P and W in 16 bits
//
// Two warpgroups take turns to issue. Without room in registers for two blocks (late_values is off), and if a tangent is
// missing, the products of values follow their softmax.

#include "ptx/fence.cuh"
#include "ptx/mbarrier.cuh"
#include "ptx/wgmma.cuh"
#include "tangent/sm80/kernel.cuh"
#include "tile/descriptor.cuh"
#include "tile/pipeline.cuh"

namespace flash_attention {

template <ForwardConfig config>
struct TangentSm90 {
  using Rows = TangentSm80<config, true>;
  using Scores = typename Rows::Scores;
  using Output = typename Rows::Output;
  using Operand = typename Rows::Operand;
  using Stage = typename Rows::Stage;
  using Descriptor = tile::Descriptor<true>;
  static constexpr Type type = Rows::type;
  static constexpr int warpgroups = config.num_warps / 4, copying = 128, stages = Rows::num_stages;
  static constexpr int block_kv = Rows::block_kv;
  using Place = tile::PipelineState<stages>;

  struct SharedStorage {
    typename Rows::SharedStorage tiles;
    ptx::Mbarrier Q_full, K_full[stages], K_empty[stages], V_full[stages], V_empty[stages];
    tile::Sequence sequence;
  };

  SharedStorage& shared;
  Rows& rows;
  const tile::TileRange tiles;
  const int warpgroup;

  /// The tiles of keys with a pair that the masks show, from the last to the first.
  struct VisitedTiles {
    const TangentSm90& kernel;
    tile::VisibleTiles visible_tiles;
    int tile_idx;
    unsigned n = 0;  // tiles before this one

    __device__ __forceinline__ explicit VisitedTiles(const TangentSm90& its_kernel) : kernel(its_kernel) {
      tile_idx = kernel.rows.tile_below(kernel.tiles.end - 1, kernel.tiles, visible_tiles);
    }
    __device__ __forceinline__ bool has_tile() const { return tile_idx >= kernel.tiles.begin; }
    __device__ __forceinline__ int kv_begin() const { return tile_idx * block_kv; }
    __device__ __forceinline__ void advance() {
      tile_idx = kernel.rows.tile_below(tile_idx - 1, kernel.tiles, visible_tiles);
      ++n;
    }
  };

  // Copies --------------------------------------------------------------------------------------------------------------

  /// Copies all tiles. Two groups of copies are in flight when an older one is published.
  __device__ __forceinline__ void copy_all() const {
    if (tiles.begin >= tiles.end) return;
    const int thread = static_cast<int>(threadIdx.x) - warpgroups * 128;
    auto& own = shared.tiles;
    rows.template load_queries<copying>(thread);
    ptx::copy_async_commit();
    VisitedTiles visited(*this);
    if (!visited.has_tile()) return tile::publish<0>(shared.Q_full);
#pragma unroll 1
    for (; visited.has_tile(); visited.advance()) {
      const Place place(visited.n), last(visited.n - 1);
      ptx::mbarrier_wait(shared.K_empty[place.stage], place.phase ^ 1);
      // Hidden, so that addresses are not kept for all tensors from tile to tile.
      rows.template load_keys<copying>(own.stages[place.stage], visited.kv_begin(), ptx::hide_from_compiler(thread));
      ptx::copy_async_commit();
      if (visited.n == 0) {
        tile::publish<1>(shared.Q_full);
      } else {
        tile::publish<2>(shared.K_full[last.stage]);
      }
      ptx::mbarrier_wait(shared.V_empty[place.stage], place.phase ^ 1);
      rows.template load_values<copying>(own.stages[place.stage], visited.kv_begin(), ptx::hide_from_compiler(thread));
      ptx::copy_async_commit();
      if (visited.n != 0) tile::publish<2>(shared.V_full[last.stage]);
    }
    const Place last(visited.n - 1);
    tile::publish<1>(shared.K_full[last.stage]);
    tile::publish<0>(shared.V_full[last.stage]);
  }

  // Products ------------------------------------------------------------------------------------------------------------

  __device__ __forceinline__ static float (&flat(Scores& tile))[block_kv / 2] {
    return reinterpret_cast<float(&)[block_kv / 2]>(tile);
  }
  __device__ __forceinline__ static float (&flat_output(Output& tile))[Rows::dim_v / 2] {
    return reinterpret_cast<float(&)[Rows::dim_v / 2]>(tile);
  }
  /// The offset of 16 columns of a tile, in bytes.
  template <class Tile>
  __device__ static constexpr int column_offset(int step) {
    return step / 4 * Tile::panel_bytes + step % 4 * 32;
  }

  /// Issues S = Q K^T, S. = Q. K^T + Q K.^T.
  template <bool has_Q, bool has_K>
  __device__ __forceinline__ void issue_scores(Scores& S, Scores& S_tangent, const Stage& stage) const {
    using QTile = typename Rows::QTile;
    using KTile = typename Rows::KTile;
    const int own_rows = warpgroup * 64 * 128;
    const Descriptor Q_rows(ptx::wgmma_descriptor(shared.tiles.Q.bytes + own_rows, 0, 1024));
    const Descriptor Q_tangent_rows(ptx::wgmma_descriptor(shared.tiles.Q_tangent.bytes + own_rows, 0, 1024));
    const Descriptor K(ptx::wgmma_descriptor(stage.K.bytes, 0, 1024));
    const Descriptor K_tangent(ptx::wgmma_descriptor(stage.K_tangent.bytes, 0, 1024));
    const auto add = [&](float(&D)[block_kv / 2], const auto& held, const Descriptor& queries, const Descriptor& keys,
                         bool accumulate) {
#pragma unroll
      for (int step = 0; step < Rows::q_steps; ++step) {
        const unsigned long long B = keys.at(column_offset<KTile>(step));
        if constexpr (Rows::Q_in_registers) {
          ptx::wgmma_rs<type, block_kv, ptx::Major::k>(D, held[step], B, accumulate || step != 0);
        } else {
          ptx::wgmma_ss<type, block_kv, ptx::Major::k, ptx::Major::k>(D, queries.at(column_offset<QTile>(step)), B,
                                                                      accumulate || step != 0);
        }
      }
    };
    ptx::wgmma_fence();  // orders the softmax's accesses to these registers before the products'
    add(flat(S), rows.Q, Q_rows, K, false);
    if constexpr (has_Q) add(flat(S_tangent), rows.Q_tangent, Q_tangent_rows, K, false);
    if constexpr (has_K) add(flat(S_tangent), rows.Q, Q_rows, K_tangent, has_Q);
    ptx::wgmma_commit();
  }
  template <int pending>
  __device__ __forceinline__ void await_scores(Scores& S, Scores& S_tangent) const {
    ptx::wgmma_wait<pending>();
    ptx::wgmma_pin(flat(S));
    ptx::wgmma_pin(flat(S_tangent));
    if constexpr (Rows::Q_in_registers) ptx::wgmma_pin(rows.Q), ptx::wgmma_pin(rows.Q_tangent);
  }

  /// Issues O += P V, A += W V + P V..
  template <bool has_V>
  __device__ __forceinline__ void issue_values(Operand& P, Operand& W, const Stage& stage) const {
    using VTile = typename Rows::VTile;
    const Descriptor V(ptx::wgmma_descriptor(stage.V.bytes, VTile::panel_bytes, 1024));
    const Descriptor V_tangent(ptx::wgmma_descriptor(stage.V_tangent.bytes, VTile::panel_bytes, 1024));
    ptx::wgmma_fence();  // ordinary instructions have written O, A, P and W
#pragma unroll
    for (int step = 0; step < Rows::kv_steps; ++step) {
      const int first = step * 16 * 128;
      ptx::wgmma_rs<type, Rows::dim_v, ptx::Major::mn>(flat_output(rows.O), P[step], V.at(first), true);
      ptx::wgmma_rs<type, Rows::dim_v, ptx::Major::mn>(flat_output(rows.A), W[step], V.at(first), true);
      if constexpr (has_V)
        ptx::wgmma_rs<type, Rows::dim_v, ptx::Major::mn>(flat_output(rows.A), P[step], V_tangent.at(first), true);
    }
    ptx::wgmma_commit();
  }
  __device__ __forceinline__ void await_values(Operand& P, Operand& W) const {
    ptx::wgmma_wait<0>();
    ptx::wgmma_pin(flat_output(rows.O));
    ptx::wgmma_pin(flat_output(rows.A));
    ptx::wgmma_pin(P);
    ptx::wgmma_pin(W);
  }

  // The loop ------------------------------------------------------------------------------------------------------------

  __device__ __forceinline__ void await(ptx::Mbarrier& full, int phase) const { ptx::mbarrier_wait(full, phase); }
  __device__ __forceinline__ void release(ptx::Mbarrier& empty) const {
    if (threadIdx.x % 128 == 0) ptx::mbarrier_arrive(empty);
  }
  // The warpgroups take turns to issue products: barriers 3 and 4.
  __device__ __forceinline__ void pingpong_wait() const {
    if constexpr (warpgroups > 1) ptx::barrier_sync(3 + warpgroup, 256);
  }
  __device__ __forceinline__ void pingpong_signal() const {
    if constexpr (warpgroups > 1) ptx::barrier_arrive(3 + (warpgroup ^ 1), 256);
  }

  __device__ __forceinline__ static void pack(const Scores& P, const Scores& W, Operand& of_P, Operand& of_W) {
#pragma unroll
    for (int step = 0; step < Rows::kv_steps; ++step) {
      tile::pack_a<type>(of_P[step], P[0][2 * step], P[0][2 * step + 1]);
      tile::pack_a<type>(of_W[step], W[0][2 * step], W[0][2 * step + 1]);
    }
    ptx::wgmma_pin(of_P);
    ptx::wgmma_pin(of_W);
  }

  /// P and W of a tile whose products of scores are complete. Returns whether move() follows.
  __device__ __forceinline__ bool exponentiate_tile(Scores& S, Scores& S_tangent, int kv_begin, float (&rescale)[2]) const {
    rows.modify(S, S_tangent, kv_begin);
    const bool moves = rows.exponentiate(S, S_tangent, rescale);
    if constexpr (config.features.dropout) rows.drop_tile(S, S_tangent, kv_begin);
    return moves;
  }

  /// The loop for all tangents: the products of values are one tile late.
  __device__ __forceinline__ void attend_late() {
    VisitedTiles visited(*this);
    if (!visited.has_tile()) return;
    if (warpgroup == 1) pingpong_signal();  // the first one begins
    Operand P, W;
    Scores S, S_tangent;
    float rescale[2];
    {
      const Place place(visited.n);
      await(shared.K_full[place.stage], place.phase);
      pingpong_wait();
      issue_scores<true, true>(S, S_tangent, shared.tiles.stages[place.stage]);
      pingpong_signal();
      await_scores<0>(S, S_tangent);
      release(shared.K_empty[place.stage]);
      if (exponentiate_tile(S, S_tangent, visited.kv_begin(), rescale)) rows.move(S, S_tangent, rescale);
      pack(S, S_tangent, P, W);
      visited.advance();
    }
#pragma unroll 1
    for (; visited.has_tile(); visited.advance()) {
      const Place place(visited.n), last(visited.n - 1);
      await(shared.K_full[place.stage], place.phase);
      pingpong_wait();
      issue_scores<true, true>(S, S_tangent, shared.tiles.stages[place.stage]);
      await(shared.V_full[last.stage], last.phase);
      issue_values<true>(P, W, shared.tiles.stages[last.stage]);
      pingpong_signal();
      await_scores<1>(S, S_tangent);
      release(shared.K_empty[place.stage]);
      const bool moves = exponentiate_tile(S, S_tangent, visited.kv_begin(), rescale);
      await_values(P, W);
      release(shared.V_empty[last.stage]);
      if (moves) rows.move(S, S_tangent, rescale);
      pack(S, S_tangent, P, W);
    }
    const Place last(visited.n - 1);
    await(shared.V_full[last.stage], last.phase);
    pingpong_wait();
    issue_values<true>(P, W, shared.tiles.stages[last.stage]);
    pingpong_signal();
    await_values(P, W);
    if (warpgroup == 0) pingpong_wait();  // no arrival is left in a barrier
  }

  template <bool flag>
  struct Flag {
    static constexpr bool value = flag;
  };

  /// The loop for tangents of which some are missing, or without registers for the products of two tiles.
  __device__ __forceinline__ void attend_serially() {
#pragma unroll 1
    for (VisitedTiles visited(*this); visited.has_tile(); visited.advance()) {
      const Place place(visited.n);
      const Stage& stage = shared.tiles.stages[place.stage];
      Scores S, S_tangent{};
      const auto scores = [&](auto has_Q, auto has_K) {
        issue_scores<decltype(has_Q)::value, decltype(has_K)::value>(S, S_tangent, stage);
        await_scores<0>(S, S_tangent);
      };
      const auto values = [&](auto has_V, Operand& P, Operand& W) {
        issue_values<decltype(has_V)::value>(P, W, stage);
        await_values(P, W);
      };
      const auto with = [](bool flag, const auto& call) {
        if (flag) {
          call(Flag<true>{});
        } else {
          call(Flag<false>{});
        }
      };
      await(shared.K_full[place.stage], place.phase);
      with(rows.tangents.has_Q, [&](auto has_Q) { with(rows.tangents.has_K, [&](auto has_K) { scores(has_Q, has_K); }); });
      release(shared.K_empty[place.stage]);
      float rescale[2];
      if (exponentiate_tile(S, S_tangent, visited.kv_begin(), rescale)) rows.move(S, S_tangent, rescale);
      Operand P, W;
      pack(S, S_tangent, P, W);
      await(shared.V_full[place.stage], place.phase);
      with(rows.tangents.has_V, [&](auto has_V) { values(has_V, P, W); });
      release(shared.V_empty[place.stage]);
    }
  }

  __device__ __forceinline__ void attend() {
    await(shared.Q_full, 0);
    if constexpr (Rows::Q_in_registers) rows.keep_queries();
    if constexpr (config.late_values) {
      if (rows.tangents.has_Q && rows.tangents.has_K && rows.tangents.has_V) return attend_late();
    }
    attend_serially();
  }
};

/// The work of one thread block. `second`: for second derivatives.
template <ForwardConfig config, bool second>
__device__ __forceinline__ void tangent_sm90_block(const AttentionArgs& args) {
  using Kernel = TangentSm90<config>;
  using Rows = typename Kernel::Rows;
  auto& shared = ptx::shared_storage<typename Kernel::SharedStorage>();
  with_tangent_block<config>(args, [&](const tile::Sequence& sequence, int head_idx, int q_begin) {
    const int warpgroup = ptx::shuffle(static_cast<int>(threadIdx.x) / 128, 0);  // known to be uniform
    if (threadIdx.x == 0) {
      shared.sequence = sequence;
      ptx::mbarrier_init(shared.Q_full, Kernel::copying);
      for (int stage = 0; stage < Kernel::stages; ++stage) {
        ptx::mbarrier_init(shared.K_full[stage], Kernel::copying);
        ptx::mbarrier_init(shared.V_full[stage], Kernel::copying);
        ptx::mbarrier_init(shared.K_empty[stage], Kernel::warpgroups);
        ptx::mbarrier_init(shared.V_empty[stage], Kernel::warpgroups);
      }
      ptx::mbarrier_init_fence();
    }
    __syncthreads();  // the barriers exist, and the sequence is there
    Rows rows(args, shared.tiles, shared.sequence, head_idx, q_begin);
    Kernel kernel{shared, rows, rows.score.sight.template key_tiles<config.block_q, config.block_kv>(q_begin), warpgroup};
    if (warpgroup == Kernel::warpgroups) {
      ptx::registers_decrease<40>();
      kernel.copy_all();
    } else {
      ptx::registers_increase<(Kernel::warpgroups == 2 ? 232 : 216)>();
      if (kernel.tiles.begin < kernel.tiles.end) kernel.attend();
      rows.template finish<second>();
    }
  });
}

template <ForwardConfig config>
__device__ __forceinline__ void tangent_sm90(const AttentionArgs& args) {
  constexpr int threads = 32 * config.num_warps + TangentSm90<config>::copying;
  tile::clear_output_tail<config>(args, threadIdx.x, threads);
  tile::clear_tangent_tail<config>(args, threadIdx.x, threads);
  tangent_sm90_block<config, false>(args);
}

}  // namespace flash_attention
