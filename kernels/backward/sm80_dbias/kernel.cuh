#pragma once

#include "backward/sm80_dbias/tile.cuh"
#include "backward/sm90/parts/scores.cuh"
#include "ptx/path.cuh"
#include "tile/product.cuh"

// The gradient of the bias with mma.sync and cp.async: sm_80 and up, 16-bit types, in each shape that a bias may have.
//
// A block takes tiles of dbias, one after the other, of block_q x block_kv elements each (block_kv elements if the
// queries broadcast). It sums dS over the axes that broadcast in registers, so there are no atomics and no workspace,
// and every run has the same bits.
//
//   for each step of the tile, a tile of queries of a head of a sequence that sees some of the keys:
//     S = Q K^T            64 columns of Q and K at a time; later ones, also of the next step, are in flight
//     P = exp(S - lse)     in place
//     dP = dO V^T          64 columns of dO and V at a time
//     dbias += P (dP - delta)
//
// In a large tile a warp has 32 x 64 elements, so a load of B feeds four instructions and a load of A eight. A thread
// holds 64 elements each of S, dP and dbias. No element depends on another query or key, so a hidden NaN reaches no
// other element.

namespace flash_attention {

template <BackwardConfig config>
struct BackwardSm80Bias {
  using Steps = BackwardSm80BiasSteps<config>;
  using Tile = BackwardSm80BiasTile<config>;
  static constexpr Features features = config.features;
  static constexpr Type type = features.dtype;
  static constexpr int block_q = Steps::block_q, block_kv = Steps::block_kv, columns = Tile::columns;
  static constexpr int panel = Steps::panel, panels = Steps::panels, all_panels = Steps::all_panels;
  static constexpr int stages = Steps::stages, ahead = Steps::ahead;
  using Shape = typename Steps::Shape;
  using Step = typename Steps::Step;
  using Stage = typename Steps::Stage;
  using QTile = typename Steps::QTile;
  using KTile = typename Steps::KTile;
  using Fragment = typename Tile::Fragment;
  using Place = typename Tile::Place;
  using Math = backward_sm90::ScoreMath<config, backward_sm90::Rows::queries, columns, true>;

  Steps steps;
  Fragment total;
  int stage = 0, step_place = 0;

  /// Finds the first two steps, and issues the first loads.
  __device__ __forceinline__ void begin() {
    if (threadIdx.x == 0) {
      steps.storage.steps[0] = steps.visible_from(steps.first_of(blockIdx.x));
      find_step(1);
    }
    __syncthreads();  // the steps are known
#pragma unroll
    for (int index = 0; index < ahead; ++index) steps.load_panel(0, index, index);
  }
  /// Finds the step at place `to`, which follows the step before it.
  __device__ __forceinline__ void find_step(int to) {
    const Step before = steps.storage.steps[to == 0 ? Steps::num_places - 1 : to - 1];
    steps.storage.steps[to] = before.tile_idx >= 0 ? steps.visible_from(steps.next_of(before)) : before;
  }
  __device__ __forceinline__ bool in_tile(int tile_idx) const {
    return steps.storage.steps[step_place].tile_idx == tile_idx;
  }

  /// C = the product of the panels [begin, end) of the step. Waits for each panel, and starts to load a later one.
  __device__ __forceinline__ void multiply_panels(Fragment& C, int begin, int end) {
    Tile::clear(C);
#pragma unroll 1
    for (int index = begin; index < end; ++index) {
      ptx::copy_async_wait<ahead - 1>();
      __syncthreads();  // the panel has landed; every warp is done with the one before, whose stage is the next to fill
      if (index == 0 && threadIdx.x == 0) find_step(Steps::after(Steps::after(step_place)));
      const bool same = index + ahead < all_panels;
      steps.load_panel(same ? step_place : Steps::after(step_place), same ? index + ahead : index + ahead - all_panels,
                       stage == 0 ? stages - 1 : stage - 1);
      const Place at;
      const Stage& operands = steps.storage.stages[stage];
      const unsigned A_address = tile::a_address<QTile>(ptx::shared_address(&operands.A), at.row, at.lane);
      const unsigned B_address = tile::b_transposed_address<KTile>(ptx::shared_address(&operands.B), at.column, at.lane);
      // The steps of 16 columns are not unrolled: fragments of several would fill the registers.
#pragma unroll 1
      for (int k = 0; k < panel / 16; ++k) {
        tile::multiply<type, 1>(
            C, [&](unsigned(&A)[4], int m, int) { ptx::ldmatrix_x4(A, QTile::step(A_address, 2 * k) + m * 16 * 128); },
            [&](unsigned(&B)[4], int n, int) { ptx::ldmatrix_x4(B, KTile::step(B_address, 2 * k) + n * 16 * 128); });
      }
      stage = stage + 1 == stages ? 0 : stage + 1;
    }
  }

  /// The scores of the step, as this warp has them.
  struct Scores {
    const Step step;
    const tile::Sequence sequence;
    const tile::Score<features> score;
    const tile::Dropout dropout;
    const int q_begin, kv_begin;
    const bool edge;

    __device__ __forceinline__ Scores(const AttentionArgs& args, const Step& at)
        : step(at),
          sequence(tile::make_sequence<features>(args, at.batch_idx)),
          score(args, sequence, at.head_idx),
          dropout(args, at.batch_idx, at.head_idx),
          q_begin(at.q_tile * block_q),
          kv_begin(at.kv_tile * block_kv),
          edge(Shape::some_hidden(score.sight, q_begin, kv_begin)) {}
  };
  __device__ __forceinline__ typename Shape::template RowStatistics<2> statistics(int lane_row) const {
    return {ptx::shared_address(&steps.storage.statistics[step_place]), lane_row};
  }

  /// Loads the biases of the step, and prefetches those of the next to L2.
  __device__ __forceinline__ void load_bias(typename Math::Bias (&bias)[2]) const {
    const Scores of(steps.args, steps.storage.steps[step_place]);
    const Place place;
#pragma unroll
    for (int m = 0; m < 2; ++m)
      bias[m].load(of.score, of.q_begin + place.lane_row + 16 * m, of.kv_begin + place.lane_column, of.kv_begin + block_kv);
    const Step& next = steps.storage.steps[Steps::after(step_place)];
    if (next.tile_idx < 0) return;
    const Scores later(steps.args, next);
    Math::Bias::template prefetch<block_q, block_kv>(later.score, later.q_begin, later.kv_begin, threadIdx.x);
  }

  /// S, dot products, becomes P. Scores that are not visible become tile::hidden().
  __device__ __forceinline__ void exponentiate(Fragment& S, const typename Math::Bias (&bias)[2],
                                               unsigned (&dropped)[2]) const {
    const Scores of(steps.args, steps.storage.steps[step_place]);
    const Place place;
    if (of.edge) ptx::path<"backward/sm80 edge tile of dbias">();
    if (!of.edge) ptx::path<"backward/sm80 inner tile of dbias">();
    const auto rows = statistics(place.lane_row);
#pragma unroll
    for (int m = 0; m < 2; ++m) {
      const Math math{of.score,
                      of.dropout,
                      of.score.unit_scale() * tile::log2_e,
                      of.q_begin,
                      of.kv_begin,
                      place.lane_row + 16 * m,
                      place.lane_column,
                      of.edge,
                      {},
                      bias[m]};
      typename Math::Marks marks;
      math.mark(marks);
      math.probabilities(
          tile_of(S[m]), marks,
          [&](int i) {
            return typename Math::Pair{rows.lse[m][Math::row_of(i)], rows.lse[m][Math::row_of(i)]};
          },
          [](int, float, float) {});
      dropped[m] = marks.dropped[0];
      if (!of.edge) continue;
#pragma unroll
      for (int i = 0; i < Math::count; ++i) {
        float& p = tile_of(S[m])[i];
        if (marks.is_hidden(i) || Math::is_nothing(p)) p = tile::hidden();
      }
    }
  }
  /// Sixteen rows of a fragment, in the order in which ScoreMath counts elements.
  __device__ __forceinline__ static typename Math::Tile& tile_of(float (&rows)[columns / 8][4]) {
    static_assert(Math::words == 1);
    return reinterpret_cast<typename Math::Tile&>(rows);
  }

  /// total += P (dP - delta).
  __device__ __forceinline__ void add(Fragment& P, Fragment& dP, const unsigned (&dropped)[2]) {
    const auto rows = statistics(Place().lane_row);
#pragma unroll
    for (int m = 0; m < 2; ++m) {
#pragma unroll
      for (int i = 0; i < Math::count; ++i) {
        const float p = tile_of(P[m])[i];
        float incoming = tile_of(dP[m])[i];
        if constexpr (features.dropout) incoming = dropped[m] >> i & 1 ? 0 : incoming * steps.args.keep_scale;
        const float dS = p * (incoming - rows.delta[m][Math::row_of(i)]);
        tile_of(total[m])[i] += tile::is_hidden(p) ? 0 : dS;
      }
    }
  }

  /// total += dS of the step. Then goes on to the next step.
  __device__ __forceinline__ void add_step() {
    Fragment S, dP;
    typename Math::Bias bias[2];
    unsigned dropped[2];
    load_bias(bias);
    multiply_panels(S, 0, panels);
    exponentiate(S, bias, dropped);
    multiply_panels(dP, panels, all_panels);
    add(S, dP, dropped);
    step_place = Steps::after(step_place);
  }
};

template <BackwardConfig config>
__device__ __forceinline__ void backward_sm80_dbias(const AttentionArgs& args) {
  if (args.dbias == nullptr) return;
  using Kernel = BackwardSm80Bias<config>;
  Kernel kernel{{args, ptx::shared_storage<typename Kernel::Steps::SharedStorage>()}};
  kernel.begin();
#pragma unroll 1
  for (int tile_idx = blockIdx.x; tile_idx < kernel.steps.num_tiles(); tile_idx += static_cast<int>(gridDim.x)) {
    Kernel::Tile::clear(kernel.total);
#pragma unroll 1
    while (kernel.in_tile(tile_idx)) kernel.add_step();
    store_dbias(kernel.steps, kernel.total, tile_idx);
  }
}

}  // namespace flash_attention
