#pragma once

#include "backward/sm80/shape.cuh"

// The steps of a tile of dbias: the queries, heads and sequences that are summed in it, and the loads of their
// operands. The kernel is in sm80_dbias/kernel.cuh.

namespace flash_attention {

template <BackwardConfig config>
struct BackwardSm80BiasSteps {
  using Shape = BackwardSm80Shape<config>;
  static constexpr Features features = config.features;
  static constexpr int block_q = Shape::block_q, block_kv = Shape::block_kv, threads = Shape::threads;
  static constexpr int warps_q = Shape::warps_q;
  using Element = typename Shape::Element;
  static constexpr int panel = 64;  // columns of Q, K, dO or V that are loaded together
  static constexpr int panels = tile::ceil_div(config.head_dim, panel);
  static constexpr int all_panels = panels + tile::ceil_div(config.head_dim_v, panel);  // those of dO and V come last
  static constexpr int stages = config.num_stages, ahead = stages - 1;
  static constexpr int num_places = 3;  // of steps: this one, the next, and the one after it, which is being found
  using QTile = tile::SwizzledTile<block_q, panel>;
  using KTile = tile::SwizzledTile<block_kv, panel>;
  static_assert(ahead <= all_panels, "loads are for this step or the next");

  /// One term of a tile of dbias: a tile of queries of a head of a sequence.
  struct Step {
    int tile_idx;
    int kv_tile;
    int q_tile;
    int head_idx;
    int batch_idx;
  };
  struct Stage {
    QTile A;  // of Q or dO
    KTile B;  // of K or V
  };
  struct SharedStorage {
    Stage stages[config.num_stages];
    float statistics[num_places][2 * block_q];  // lse and delta of a step
    float sums[warps_q][block_kv];              // of the warps' queries, where all of them are summed
    Step steps[num_places];
  };

  const AttentionArgs& args;
  SharedStorage& storage;

  // The axes that broadcast, and the numbers of tiles. They are read from the arguments each time, because registers
  // are short.
  __device__ __forceinline__ bool all_queries() const { return args.dbias_q_stride == 0; }
  __device__ __forceinline__ bool all_heads() const { return args.dbias_head_stride == 0; }
  __device__ __forceinline__ bool all_batch() const { return args.dbias_batch_stride == 0; }
  __device__ __forceinline__ int num_q_tiles() const { return tile::ceil_div(args.seq_q, block_q); }
  __device__ __forceinline__ int num_kv_tiles() const { return tile::ceil_div(args.seq_kv, block_kv); }
  __device__ __forceinline__ int num_tiles() const {
    return num_kv_tiles() * (all_queries() ? 1 : num_q_tiles()) * (all_heads() ? 1 : args.heads_q) *
           (all_batch() ? 1 : args.batch);
  }

  __device__ __forceinline__ static int after(int place) { return place + 1 == num_places ? 0 : place + 1; }

  /// The first step that a tile may have: 0 on the axes that broadcast, the tile's own index on the others.
  __device__ __forceinline__ Step first_of(int tile_idx) const {
    Step step{tile_idx, tile_idx % num_kv_tiles(), 0, 0, 0};
    int rest = tile_idx / num_kv_tiles();
    if (!all_queries()) step.q_tile = rest % num_q_tiles(), rest /= num_q_tiles();
    if (!all_heads()) step.head_idx = rest % args.heads_q, rest /= args.heads_q;
    step.batch_idx = rest;
    return step;
  }

  /// The next step: along the axes that broadcast, the queries fastest; then the first step of the block's next tile.
  __device__ __forceinline__ Step next_of(Step step) const {
    if (all_queries() && ++step.q_tile < num_q_tiles()) return step;
    if (all_queries()) step.q_tile = 0;
    if (all_heads() && ++step.head_idx < args.heads_q) return step;
    if (all_heads()) step.head_idx = 0;
    if (all_batch() && ++step.batch_idx < args.batch) return step;
    return first_of(step.tile_idx + static_cast<int>(gridDim.x));
  }

  /// The first step, from `step` on, that has a visible pair. If there is no such step, its tile is -1.
  __device__ __forceinline__ Step visible_from(Step step) const {
#pragma unroll 1
    while (step.tile_idx < num_tiles() && args.batch > 0) {
      const tile::Sequence sequence = tile::make_sequence<features>(args, step.batch_idx);
      const tile::Visibility<features> sight(args, sequence, step.head_idx);
      const int q_begin = step.q_tile * block_q;
      const auto tiles = sight.template key_tiles<block_q, block_kv>(q_begin);
      if (step.kv_tile >= tiles.begin && step.kv_tile < tiles.end &&
          !sight.template masks_hide<block_q, block_kv>(q_begin, step.kv_tile * block_kv))
        return step;
      step = next_of(step);
    }
    step.tile_idx = -1;
    return step;
  }

  /// Starts to copy 64 columns. Columns past `dim`, and rows that do not exist, become zero.
  template <int dim, typename Tile>
  __device__ __forceinline__ static void load(const tile::Rows<const Element>& rows, int first_column, unsigned address) {
    constexpr int step = threads / 8;
    const int piece = threadIdx.x % 8, first = threadIdx.x / 8;
    const bool exists = dim % panel == 0 || first_column + 8 * piece < dim;
    const Element* from = rows.row(first) + first_column + 8 * piece;
    const unsigned target = address + Tile::offset(first, piece);
#pragma unroll
    for (int begin = 0; begin < Tile::rows; begin += step) {
      ptx::copy_async(target + begin * 128, from, exists && begin + first < rows.count ? 16 : 0);
      from += step * rows.stride;
    }
  }

  /// Starts to copy a panel of the step at `place` to a stage, as one group of copies. The first panel also loads the
  /// statistics of its rows.
  __device__ __forceinline__ void load_panel(int place, int index, int stage) const {
    const Step step = storage.steps[place];
    if (step.tile_idx >= 0) {
      const tile::Sequence sequence = tile::make_sequence<features>(args, step.batch_idx);
      const int q_begin = step.q_tile * block_q, kv_begin = step.kv_tile * block_kv, kv_head = step.head_idx / args.group;
      const unsigned A = ptx::shared_address(&storage.stages[stage].A), B = ptx::shared_address(&storage.stages[stage].B);
      if (index < panels) {
        load<config.head_dim, QTile>(Shape::queries(args.Q, sequence, step.head_idx).from(q_begin), index * panel, A);
        load<config.head_dim, KTile>(Shape::keys(args.K, sequence, kv_head).from(kv_begin), index * panel, B);
      } else {
        const int column = (index - panels) * panel;
        load<config.head_dim_v, QTile>(Shape::queries(args.dO, sequence, step.head_idx).from(q_begin), column, A);
        load<config.head_dim_v, KTile>(Shape::keys(args.V, sequence, kv_head).from(kv_begin), column, B);
      }
      if (index == 0)
        Shape::load_statistics(args, sequence, step.head_idx, q_begin, ptx::shared_address(&storage.statistics[place]));
    }
    ptx::copy_async_commit();
  }
};

}  // namespace flash_attention
