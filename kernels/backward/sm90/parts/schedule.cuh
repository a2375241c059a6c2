#pragma once

// How the blocks of a persistent kernel share its tasks. A block's first task is its own index. Later tasks come from a
// counter in the workspace (zeroed by backward_sm90_prepare), so a block with short tasks takes more of them.

#include "backward/sm90/parts/shape.cuh"
#include "ptx/atomic.cuh"
#include "ptx/path.cuh"
#include "ptx/tma.cuh"

namespace flash_attention::backward_sm90 {

/// The order of the tasks. Under a causal mask those with the most work come first, so that all blocks end together.
/// But heads are taken in sections whose rows fit into L2, where many blocks read them at the same time.
struct TaskOrder {
  int num_tiles;  // tiles of a head, and the parts of its first tile
  int num_heads;  // of the whole batch
  int section;    // heads
  int last;       // heads of the last section, if it differs
  int parts = 1;  // of the first tile of a head

  template <BackwardConfig config>
  __device__ __forceinline__ static TaskOrder make(int num_tiles, int num_heads, int rows_read) {
    // Half of an H200's 50 MB of L2 is for the rows of a section. docs/lab/backward_sm90.md has the gain.
    constexpr int section_rows = (24 << 20) / ((config.head_dim + config.head_dim_v) * 2);
    const bool imbalanced = config.features.has_window();
    if (!imbalanced) return {num_tiles, num_heads, 1, 0};
    const int section = tile::max(tile::min(section_rows / tile::max(rows_read, 1), num_heads), 1);
    // The heads that are left over belong to the last section. Alone they would have about one task for each SM, of any
    // length: 256, causal, 8k: 5 % of the kernel of dK and dV and 11 % of that of dQ.
    return {num_tiles, num_heads, section, tile::min(section + num_heads % section, num_heads)};
  }

  /// One head after the other, which keeps their sums in L2, except for the last heads: among these, too, tasks with
  /// the most work come first. Tasks are taken strictly head by head if they accumulate in order (ordered_sums.cuh). So
  /// are tasks of split groups if the producer warp has no registers for the sections.
  template <BackwardConfig config>
  __device__ __forceinline__ static TaskOrder by_heads(int num_tiles, int num_heads, int rows_read) {
    // H200, 128, causal, TFLOP/s at 512, 2k, 8k: none 223, 420, 544; 16k rows 226, 436, 559; 64k 216, 437, 567. At 512,
    // 64k rows are 128 heads, too many for L2: hence the limit of 32 heads (docs/lab/backward_sm90.md).
    constexpr int last_rows = 1 << 16, last_heads = Shape<config>::warpgroups == 2 ? 32 : last_rows;
    const bool imbalanced = config.features.has_window();
    constexpr bool simple = Shape<config>::ordered || (config.key_sums && Shape<config>::next_sequence_rows);
    if constexpr (config.interleave_heads) return {num_tiles, num_heads, num_heads, 0};
    if (!imbalanced || simple) return {num_tiles, num_heads, 1, 0};
    // If there are few tasks, all are ordered by length: the longest one of grouped heads is half of an SM's work, too
    // much to begin near the end. Only if the producer warp has registers for it: with options, or at head dimension
    // 64, it would spill.
    constexpr bool few_by_length =
        Shape<config>::warpgroups == 2 && config.head_dim > 64 && !config.features.touches_scores();
    const bool few = few_by_length && num_tiles * num_heads <= 4 * static_cast<int>(gridDim.x);
    const int last = few ? last_heads : tile::min(tile::ceil_div(last_rows, tile::max(rows_read, 1)), last_heads);
    return {num_tiles, num_heads, 1, tile::min(last, num_heads)};
  }

  __device__ __forceinline__ int count() const { return num_tiles * num_heads; }

  struct Place {
    int tile;  // 0 has the most work
    int head;
    int part;  // parts - 1 if the tile is not split
  };
  __device__ __forceinline__ Place operator[](int task_idx) const {
    const bool at_end = task_idx >= (num_heads - last) * num_tiles;
    const int first_head = at_end ? num_heads - last : task_idx / (section * num_tiles) * section;
    const int rest = task_idx - first_head * num_tiles;
    const int heads = at_end ? last : tile::min(section, num_heads - first_head);
    const int rank = rest / heads;
    return {tile::max(rank - parts + 1, 0), first_head + rest % heads, tile::min(rank, parts - 1)};
  }
};

/// If there are few key heads, the query heads of one key head are split between tasks.
template <BackwardConfig config>
__device__ __forceinline__ int num_gqa_splits(const AttentionArgs& args) {
  return config.key_sums ? args.num_splits : 1;
}

/// The order of the tiles of keys. Each split of a group counts as a head.
template <BackwardConfig config>
__device__ __forceinline__ TaskOrder task_order(const AttentionArgs& args) {
  const int splits = num_gqa_splits<config>(args);
  const int parts = splits_first<config>(args) ? backward_sm90_first_parts(args.seq_q) : 1;
  TaskOrder order = TaskOrder::by_heads<config>(tile::ceil_div(args.seq_kv, config.block_kv) + parts - 1,
                                                args.heads_kv * splits * args.batch, args.seq_q * (args.group / splits));
  order.parts = parts;
  // If there are few heads, L2 holds them all, and the parts are taken before the other tiles. Otherwise a part might
  // begin when all other tasks are done.
  constexpr int last_heads = 4;
  if (parts > 1 && order.last == 0) order.last = tile::min(last_heads, order.num_heads);
  return order;
}
/// The tile of keys of a task. Its head is a split of a group: each key head has num_gqa_splits() of them.
struct KeyBlock {
  int tile_idx;
  int head_idx;
  int batch_idx;
  int part;  // of the queries, if the tile is split
};
template <BackwardConfig config>
__device__ __forceinline__ KeyBlock key_block_of(const AttentionArgs& args, int task_idx) {
  const int heads = args.heads_kv * num_gqa_splits<config>(args);
  const auto place = task_order<config>(args)[task_idx];
  // Tasks that accumulate in order begin with the last keys (ordered_sums.cuh).
  const int tile_idx = Shape<config>::ordered ? task_order<config>(args).num_tiles - 1 - place.tile : place.tile;
  return {tile_idx, place.head % heads, place.head / heads, place.part};
}

/// The latest tasks of a block: one lane takes tasks from the counter, all other threads read them here.
struct TaskQueue {
  int task_idx[2];
  ptx::Mbarrier full[2], empty[2];

  __device__ __forceinline__ void init(int readers) {
    for (int stage = 0; stage < 2; ++stage) {
      ptx::mbarrier_init(full[stage], 1);
      ptx::mbarrier_init(empty[stage], readers);
    }
  }

  /// For one lane of the block: calls use(task) for each task.
  template <typename Use>
  __device__ __forceinline__ void produce(unsigned* counter, int num_tasks, Use use) {
    int task = blockIdx.x;
#pragma unroll 1
    for (unsigned n = 0;; ++n) {
      const PipelineState<2> state(n);
      ptx::mbarrier_wait(empty[state.stage], state.phase ^ 1);  // everyone has read what was in the stage
      task_idx[state.stage] = task;
      ptx::mbarrier_arrive(full[state.stage]);
      if (task >= num_tasks) return;
      use(task);
      if (n > 0) ptx::path<"backward/sm90 task by the counter">();
      task = static_cast<int>(gridDim.x + ptx::atomic_add(counter, 1));
    }
  }

  /// For all other threads, each by itself.
  template <typename Use>
  __device__ __forceinline__ void consume(int num_tasks, Use use) {
#pragma unroll 1
    for (unsigned n = 0;; ++n) {
      const PipelineState<2> state(n);
      ptx::mbarrier_wait(full[state.stage], state.phase);  // the task is written
      const int task = task_idx[state.stage];
      ptx::mbarrier_arrive(empty[state.stage]);
      if (task >= num_tasks) return;
      use(task);
    }
  }
};

/// Loads the chunks of a tile, from `first_chunk` of the tensor's rows on. The caller has told `full` how many bytes to
/// expect.
template <typename Chunk, int chunks>
__device__ __forceinline__ void load_tile(Chunk (&tile)[chunks], ptx::Mbarrier& full, const abi::TensorMap& map, int row,
                                          int head_idx, int batch_idx, int first_chunk = 0) {
#pragma unroll
  for (int c = 0; c < chunks; ++c)
    ptx::tma_load_4d(tile[c], map, full, (first_chunk + c) * chunk_dim, row, head_idx, batch_idx);
}

}  // namespace flash_attention::backward_sm90
