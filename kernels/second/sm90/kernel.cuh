#pragma once

// Second derivatives with wgmma: sm_90, bfloat16, heads of up to 128 columns, the same bits in every run. The launches,
// the two sides of a tile and its weights are those of second/sm80; the launch of the rows is the loop of tangent/sm90.
//
// A thread block owns 128 rows, 64 for each of two warpgroups; a third one copies (cp.async) tiles of columns into a ring
// of stages:
//
//   for each tile of columns, of each query head of the group:
//     wait for it
//     S = X_row X^T, S. = X_row. X^T + X_row X.^T, dP = Y_row Y^T, dP. from Y_row. or Y.       multiply
//     W, dS, dS.                                                                              second/sm80
//     dV += W Y (rows are keys),  dX += dS X + dS. X.                                         add
//     release it
//
// The softmax of one warpgroup runs under the products of the other.

#include "ptx/fence.cuh"
#include "ptx/mbarrier.cuh"
#include "ptx/wgmma.cuh"
#include "second/sm80/kernel.cuh"
#include "tangent/sm90/kernel.cuh"
#include "tile/descriptor.cuh"
#include "tile/pipeline.cuh"

namespace flash_attention {

template <BackwardConfig config, bool of_keys>
struct SecondSm90 {
  using Sides = SecondSm80<config, of_keys, true>;
  using Tile = typename Sides::Tile;
  using Operand = typename Sides::Operand;
  using ColumnSide = typename Sides::ColumnSide;
  using RowSide = typename Sides::RowSide;
  using Step = typename Sides::Step;
  using Descriptor = tile::Descriptor<true>;
  static constexpr Type type = Sides::type;
  static constexpr int columns = Sides::columns, computing = Sides::threads, copying = 128, stages = Sides::num_stages;
  using Place = tile::PipelineState<stages>;

  struct SharedStorage {
    typename Sides::SharedStorage tiles;
    ptx::Mbarrier row_full, full[stages], empty[stages];
    tile::Sequence sequence;
  };

  SharedStorage& shared;
  Sides& sides;
  const int warpgroup;

  // Copies --------------------------------------------------------------------------------------------------------------

  __device__ __forceinline__ void copy_all() const {
    const int thread = static_cast<int>(threadIdx.x) - computing;
    const tile::TileRange range = sides.tiles();
    Step at = sides.seek({sides.first_head, range.begin}, range);
    if (at.head_idx == sides.end_head) return;
    sides.template load<copying>(shared.tiles.row, sides.first_head, sides.row_begin, thread);
    ptx::copy_async_commit();
    unsigned n = 0;
#pragma unroll 1
    for (; at.head_idx < sides.end_head; at = sides.seek({at.head_idx, at.tile_idx + 1}, range), ++n) {
      const Place place(n);
      ptx::mbarrier_wait(shared.empty[place.stage], place.phase ^ 1);
      // Hidden, so that addresses are not kept for all tensors from tile to tile.
      sides.template load_columns<copying>(shared.tiles.stages[place.stage], at, ptx::hide_from_compiler(thread));
      tile::publish<1>(n == 0 ? shared.row_full : shared.full[Place(n - 1).stage]);
    }
    tile::publish<0>(shared.full[Place(n - 1).stage]);
  }

  // Products ------------------------------------------------------------------------------------------------------------

  __device__ __forceinline__ static float (&flat(Tile& tile))[columns / 2] {
    return reinterpret_cast<float(&)[columns / 2]>(tile);
  }
  template <int blocks>
  __device__ __forceinline__ static float (&flat_sums(float (&sums)[1][blocks][4]))[4 * blocks] {
    return reinterpret_cast<float(&)[4 * blocks]>(sums);
  }

  /// Issues C (+)= A B^T. A has the block's rows, B the tile's columns.
  template <class A, class B>
  __device__ __forceinline__ void issue_dots(Tile& C, const A& of_rows, const B& of_columns, bool accumulate) const {
    const Descriptor rows(ptx::wgmma_descriptor(of_rows.bytes + warpgroup * 64 * 128, 0, 1024));
    const Descriptor others(ptx::wgmma_descriptor(of_columns.bytes, 0, 1024));
#pragma unroll
    for (int step = 0; step < A::columns / 16; ++step) {
      const int inside = step % 4 * 32, panel = step / 4;
      ptx::wgmma_ss<type, columns, ptx::Major::k, ptx::Major::k>(flat(C), rows.at(panel * A::panel_bytes + inside),
                                                                others.at(panel * B::panel_bytes + inside),
                                                                accumulate || step != 0);
    }
  }
  /// Issues C += weights B.
  template <class B, int blocks>
  __device__ __forceinline__ static void issue_sums(float (&C)[1][blocks][4], const Operand& weights, const B& of_columns) {
    const Descriptor others(ptx::wgmma_descriptor(of_columns.bytes, B::panel_bytes, 1024));
#pragma unroll
    for (int step = 0; step < columns / 16; ++step)
      ptx::wgmma_rs<type, B::columns, ptx::Major::mn>(flat_sums(C), weights[step], others.at(step * 16 * 128), true);
  }

  /// Runs products of a tangent that may be missing.
  template <class Issue>
  __device__ __forceinline__ static void run_if(bool given, Tile& C, const Issue& issue) {
    if (!given) return;
    ptx::wgmma_fence();
    issue();
    ptx::wgmma_commit();
    ptx::wgmma_wait<0>();
    ptx::wgmma_pin(flat(C));
  }

  /// `all`: all tangents are given.
  template <bool all>
  __device__ __forceinline__ void multiply(Tile& S, Tile& S_tangent, Tile& dP, Tile& dP_tangent,
                                           const ColumnSide& column) const {
    const RowSide& row = shared.tiles.row;
    const auto add_V_tangent = [&] {
      if constexpr (of_keys) {
        issue_dots(dP_tangent, row.Y_tangent, column.Y, !all);
      } else {
        issue_dots(dP_tangent, row.Y, column.Y_tangent, !all);
      }
    };
    ptx::wgmma_fence();  // ordinary instructions have used these registers
    issue_dots(S, row.X, column.X, false);
    if constexpr (all) {
      issue_dots(S_tangent, row.X_tangent, column.X, false);
      issue_dots(S_tangent, row.X, column.X_tangent, true);
    }
    issue_dots(dP, row.Y, column.Y, false);
    if constexpr (all) add_V_tangent();
    ptx::wgmma_commit();
    ptx::wgmma_wait<0>();
    ptx::wgmma_pin(flat(S));
    ptx::wgmma_pin(flat(S_tangent));
    ptx::wgmma_pin(flat(dP));
    ptx::wgmma_pin(flat(dP_tangent));
    if constexpr (!all) {
      run_if(sides.has_row_tangent(), S_tangent, [&] { issue_dots(S_tangent, row.X_tangent, column.X, true); });
      run_if(sides.has_column_tangent(), S_tangent, [&] { issue_dots(S_tangent, row.X, column.X_tangent, true); });
      run_if(sides.has_V, dP_tangent, add_V_tangent);
    }
  }

  __device__ __forceinline__ void await_sums() const {
    ptx::wgmma_wait<0>();
    ptx::wgmma_pin(flat_sums(sides.dX));
    if constexpr (of_keys) ptx::wgmma_pin(flat_sums(sides.dV));
  }

  /// dV += W Y, dX += dS X + dS. X..
  template <bool all>
  __device__ __forceinline__ void add(const Tile& W, const Tile& dS, const Tile& dS_tangent, const ColumnSide& column) const {
    Operand of_W, of_S, of_tangent;
    if constexpr (of_keys) Sides::pack(of_W, W);
    Sides::pack(of_S, dS);
    Sides::pack(of_tangent, dS_tangent);
    ptx::wgmma_fence();  // ordinary instructions have written the weights
    if constexpr (of_keys) issue_sums(sides.dV, of_W, column.Y);
    issue_sums(sides.dX, of_S, column.X);
    if constexpr (all) issue_sums(sides.dX, of_tangent, column.X_tangent);
    ptx::wgmma_commit();
    await_sums();
    if constexpr (!all) {
      if (sides.has_column_tangent()) {
        ptx::wgmma_fence();
        issue_sums(sides.dX, of_tangent, column.X_tangent);
        ptx::wgmma_commit();
        await_sums();
      }
    }
  }

  // The loop ------------------------------------------------------------------------------------------------------------

  /// Both warpgroups.
  __device__ __forceinline__ static void sync() { ptx::barrier_sync(3, computing); }

  template <bool all>
  __device__ __forceinline__ void visit(const Step& at, ColumnSide& column) const {
    Tile S, S_tangent{}, dP, dP_tangent{};
    multiply<all>(S, S_tangent, dP, dP_tangent, column);
    const tile::Score<Sides::features> score = sides.score_of(at);
    const int q_begin = sides.q_begin(at), kv_begin = sides.kv_begin(at);
    const bool some_hidden = q_begin + Sides::block_q > score.sight.len_q ||
                             !score.sight.template all_visible<Sides::block_q, Sides::block_kv>(q_begin, kv_begin);
    if (some_hidden) {
      ptx::path<"second/sm90 edge tile">();
      if constexpr (Sides::hides) {
        sync();  // both have multiplied: values that are not finite may be replaced
        sides.clear_nonfinite(column);
        ptx::fence_async_shared();
        sync();  // they have been replaced
      }
      sides.template differentiate<true>(S, S_tangent, dP, dP_tangent, column, at);
    } else {
      ptx::path<"second/sm90 inner tile">();
      sides.template differentiate<false>(S, S_tangent, dP, dP_tangent, column, at);
    }
    add<all>(S, dP, dP_tangent, column);
  }

  template <bool all>
  __device__ __forceinline__ void attend() const {
    const tile::TileRange range = sides.tiles();
    Step at = sides.seek({sides.first_head, range.begin}, range);
    if (at.head_idx == sides.end_head) return;
    ptx::mbarrier_wait(shared.row_full, 0);
#pragma unroll 1
    for (unsigned n = 0; at.head_idx < sides.end_head; at = sides.seek({at.head_idx, at.tile_idx + 1}, range), ++n) {
      const Place place(n);
      ptx::mbarrier_wait(shared.full[place.stage], place.phase);
      visit<all>(at, shared.tiles.stages[place.stage]);
      if (threadIdx.x % 128 == 0) ptx::mbarrier_arrive(shared.empty[place.stage]);
    }
  }

  __device__ __forceinline__ void run() const {
    if (warpgroup == computing / 128) {
      ptx::registers_decrease<40>();
      return copy_all();
    }
    ptx::registers_increase<232>();
    if (sides.has_Q && sides.has_K && sides.has_V) {
      attend<true>();
    } else {
      attend<false>();
    }
    sides.finish();
  }
};

template <BackwardConfig config, bool of_keys>
__device__ __forceinline__ void second_sm90_block(const AttentionArgs& args, const tile::Sequence& sequence, int first_head,
                                                  int heads, int row_begin) {
  using Kernel = SecondSm90<config, of_keys>;
  auto& shared = ptx::shared_storage<typename Kernel::SharedStorage>();
  if (threadIdx.x == 0) {
    shared.sequence = sequence;
    ptx::mbarrier_init(shared.row_full, Kernel::copying);
    for (int stage = 0; stage < Kernel::stages; ++stage) {
      ptx::mbarrier_init(shared.full[stage], Kernel::copying);
      ptx::mbarrier_init(shared.empty[stage], Kernel::computing / 128);
    }
    ptx::mbarrier_init_fence();
  }
  __syncthreads();  // the barriers exist, and the sequence is there
  typename Kernel::Sides sides(args, shared.tiles, shared.sequence, first_head, heads, row_begin);
  Kernel{shared, sides, ptx::shuffle(static_cast<int>(threadIdx.x) / 128, 0)}.run();
}

/// Writes each row's statistics for the other launches, and O. and lse. if they are wanted. Clears rows of no sequence.
template <ForwardConfig config>
__device__ __forceinline__ void second_sm90_rows(const AttentionArgs& args) {
  constexpr int threads = 32 * config.num_warps + TangentSm90<config>::copying;
  tile::clear_tangent_tail<config>(args, threadIdx.x, threads);
  tile::clear_gradient_tails<config>(args, threadIdx.x, threads);
  if (args.seq_q != 0) tangent_sm90_block<config, true>(args);
}

template <BackwardConfig config>
__device__ __forceinline__ void second_sm90_dkv(const AttentionArgs& args) {
  const auto block = tile::key_block(blockIdx.x, tile::ceil_div(args.seq_kv, config.block_kv), args.heads_kv);
  const tile::Sequence sequence = tile::make_sequence<config.features>(args, block.batch_idx);
  const int kv_begin = block.tile_idx * config.block_kv;
  if (kv_begin < sequence.rows_kv)
    second_sm90_block<config, true>(args, sequence, block.head_idx * args.group, args.group, kv_begin);
}

template <BackwardConfig config>
__device__ __forceinline__ void second_sm90_dq(const AttentionArgs& args) {
  const auto block = tile::query_block(blockIdx.x, tile::ceil_div(args.seq_q, config.block_q), args.heads_q);
  const tile::Sequence sequence = tile::make_sequence<config.features>(args, block.batch_idx);
  const int q_begin = block.tile_idx * config.block_q;
  if (q_begin < sequence.rows_q) second_sm90_block<config, false>(args, sequence, block.head_idx, 1, q_begin);
}

}  // namespace flash_attention
