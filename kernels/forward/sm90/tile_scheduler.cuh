#pragma once

// Which tiles a block works on, in which order, and which keys each of them sees. The producer warp works this out and
// hands it to the warpgroups that attend, together with Q.

#include "forward/sm90/block_list.cuh"
#include "forward/sm90/blocks_seen.cuh"
#include "ptx/atomic.cuh"
#include "ptx/cluster.cuh"
#include "ptx/path.cuh"
#include "tile/score.cuh"

namespace flash_attention::forward_sm90 {

/// The tiles of this block. In each round every block takes one row tile, neighbours in the same head, so that L2 holds its
/// keys. Where the last row tile of a head may be short, a block moves on by one place with each round. With pair_tiles it
/// takes row tile `last - x` and then row tile x: under a causal mask every pair is the same work.
template <ForwardConfig config>
struct Schedule : BlocksSeen<config> {
  using BlocksSeen<config>::block_at_diagonal, BlocksSeen<config>::begins_far_away, BlocksSeen<config>::blocks_seen;
  using Unit = typename Shape<config>::Unit;

  const AttentionArgs& args;
  int units_per_head;  // row tiles, or pairs of them
  int num_units;
  int step;  // places that a block moves on with each round
  int num_iterations;
  // dynamic_scheduler: a block claims neighbouring units together if there are more than it could remember one by one.
  Unit* claimed;  // what it claimed, in order
  int next = 0;   // what it has claimed and not begun
  static constexpr int not_claimed = -1;
  int claim = 1;  // units of a claim
  int num_claims = 0;
  int section;  // heads whose keys L2 holds together

  __device__ __forceinline__ Schedule(const AttentionArgs& arguments, Unit* claimed_units)
      : args(arguments), claimed(claimed_units) {
    const int row_tiles = tile::ceil_div(args.seq_q, config.block_q);
    units_per_head = config.pair_tiles ? tile::ceil_div(row_tiles, 2) : row_tiles;
    num_units = units_per_head * args.heads_q * args.batch * num_splits();
    step = config.features.packed || config.features.seqused_q || args.seq_q % config.block_q != 0 ? 1 : 0;
    const int rounds = num_units / unit_stride();
    const int mine = rounds + (unit_of_round(rounds) < num_units ? 1 : 0);
    num_iterations = config.pair_tiles ? 2 * mine : mine;
    if constexpr (config.dynamic_scheduler) {
      constexpr int l2_bytes = 32 << 20;  // of an H200's 50 MB, for K and V: docs/lab/forward_sm90.md has what it gained
      const long long head_bytes = 2ll * args.seq_kv * (config.head_dim + config.head_dim_v);
      section = static_cast<int>(l2_bytes / head_bytes) * args.group;
      section = tile::max(1, tile::min(section, args.heads_q * args.batch));
      constexpr int max_claims = Shape<config>::tiles_kept * 3 / 4;  // for each block: some take more than others
      if constexpr (Shape<config>::mask_words) claim = tile::ceil_div(num_units, max_claims * unit_stride());
      num_claims = tile::ceil_div(num_units, claim);
      next = first_unit();
    }
  }

  __device__ __forceinline__ int take() const {
    return unit_stride() + static_cast<int>(ptx::atomic_add(static_cast<unsigned*>(args.workspace), 1));
  }

  /// Claims what comes after iteration i, where that is not of the same claim: a while before it is asked for.
  __device__ __forceinline__ void claim_after(int i) {
    if (next == not_claimed && (i + 1) % claim == 0) next = take();
  }

  /// Whether this block has an iteration i. Called for each in order.
  __device__ __forceinline__ bool has(int i, int attempt) {
    if constexpr (config.dynamic_scheduler) {
      if (attempt == 0) {
        num_iterations = i;
        const int place = i / claim;
        if (place * claim < i) return claimed_unit(i) < num_units;  // of the same claim
        if (next == not_claimed) next = take();
        if (next >= num_claims) return false;
        if (i > 0) ptx::path<"forward/sm90 tile by the counter">();
        claimed[place] = static_cast<Unit>(next);
        // What cannot be remembered is left to others: a block alone on the GPU for a while comes this far.
        next = place + 1 < Shape<config>::tiles_kept ? not_claimed : num_claims;
        if (!Shape<config>::claims_late) claim_after(i);
        return true;
      }
    }
    return i < num_iterations;
  }

  __device__ __forceinline__ int num_splits() const { return config.split_keys ? args.num_splits : 1; }

  /// Blocks of a cluster have the same units.
  __device__ __forceinline__ static int first_unit() { return static_cast<int>(blockIdx.x) / Shape<config>::cluster; }
  __device__ __forceinline__ static int unit_stride() { return static_cast<int>(gridDim.x) / Shape<config>::cluster; }

  __device__ __forceinline__ int unit_of_round(int round) const {
    return round * unit_stride() + (first_unit() + round * step) % unit_stride();
  }

  __device__ __forceinline__ int claimed_unit(int iteration) const {
    return claimed[iteration / claim] * claim + iteration % claim;
  }

  /// A row tile of a head, or a pair of them.
  struct RowTile {
    int head_idx;
    int batch_idx;
    int position;  // in the head
    int split;     // of its keys
  };
  __device__ __forceinline__ RowTile unit_at(int iteration) const {
    if constexpr (config.dynamic_scheduler) {  // the longest row tile of each head of a section, then the next longest
      const int heads = args.heads_q * args.batch, unit = claimed_unit(iteration);
      const int sections_before = unit / (section * units_per_head);
      const int inside = unit - sections_before * section * units_per_head;
      const int heads_here = tile::min(section, heads - sections_before * section);
      const int row = inside / heads_here;
      const int head_of_batch = sections_before * section + inside - row * heads_here;
      const int batch_idx = head_of_batch / args.heads_q;
      return {head_of_batch - batch_idx * args.heads_q, batch_idx, units_per_head - 1 - row, 0};
    }
    const int unit = unit_of_round(config.pair_tiles ? iteration / 2 : iteration);
    const int split_of_head = unit / units_per_head, head_of_batch = split_of_head / num_splits();
    const int batch_idx = head_of_batch / args.heads_q;
    return {head_of_batch - batch_idx * args.heads_q, batch_idx, unit - split_of_head * units_per_head,
            split_of_head - head_of_batch * num_splits()};
  }

  /// Fills `tile` in, which is in shared memory: the producer warp has few registers. Returns whether there is one.
  __device__ __forceinline__ bool tile_at(int iteration, Attempt attempt, Tile& tile) const {
    const RowTile unit = unit_at(iteration);
    const tile::Sequence sequence = tile::make_sequence<config.features>(args, unit.batch_idx);
    int row_tile = unit.position;
    if constexpr (config.pair_tiles) {
      const int opposite = tile::ceil_div(sequence.rows_q, config.block_q) - 1 - unit.position;
      const bool second = iteration % 2 != 0;
      if (unit.position > opposite || (second && unit.position == opposite)) {
        ptx::path<"forward/sm90 tile without its pair">();
        return false;
      }
      if (second) ptx::path<"forward/sm90 second tile of a pair">();
      if (!second) row_tile = opposite;
    }
    if (row_tile * config.block_q >= sequence.rows_q) {
      ptx::path<"forward/sm90 tile past its sequence">();
      return false;
    }
    tile.iteration = iteration;
    tile.attempt = attempt;
    tile.q_begin = row_tile * config.block_q;
    tile.head_idx = unit.head_idx;
    tile.sequence = sequence;
    if constexpr (config.split_keys) tile.split = unit.split;
    find_blocks(tile, attempt);
    return true;
  }

  __device__ __forceinline__ void find_blocks(Tile& tile, Attempt attempt) const {
    const tile::Score<config.features> score(args, tile.sequence, tile.head_idx);
    tile::TileRange loaded = score.template key_tiles<config.block_q, config.block_kv>(tile.q_begin);
    if constexpr (config.split_keys) loaded = take_split(loaded, tile.split);
    tile.first = Shape<config>::forwards        ? loaded.begin
                 : Shape<config>::from_diagonal ? block_at_diagonal(score, loaded, tile.q_begin + config.block_q - 1)
                                                : loaded.end - 1;
    tile.blocks = loaded.end - loaded.begin;
    if (attempt == Attempt::fixed_max && begins_far_away(score, loaded, tile.q_begin)) {
      ptx::path<"forward/sm90 tile far from the diagonal">();
      attempt = tile.attempt = Attempt::online_max;
    }
    if constexpr (Shape<config>::listed) list_blocks<config>(args, tile, score, loaded);
    tile.work = tile.sees_nothing()                  ? Work::write_zeros
                : attempt == Attempt::nonfinite_safe ? Work::attend_nonfinite_safe
                                                     : Work::attend;
    if constexpr (Shape<config>::listed) return;
    if constexpr (Shape<config>::cluster > 1) return take_rows_of_block(tile, score, loaded, attempt);
#pragma unroll 1
    for (int w = 0; w < Shape<config>::row_groups; ++w) {
      // In Attempt::nonfinite_safe the warpgroups go through the blocks together.
      tile.seen[w] = attempt == Attempt::nonfinite_safe ? Blocks{0, tile.blocks, tile.blocks, tile.blocks}
                                                        : blocks_seen(score, loaded, tile.q_begin + w * wg_rows, attempt);
    }
  }

  /// An equal share of the blocks that the tile sees.
  __device__ __forceinline__ tile::TileRange take_split(tile::TileRange all, int split) const {
    const int blocks = all.end - all.begin;
    return {all.begin + blocks * split / args.num_splits, all.begin + blocks * (split + 1) / args.num_splits};
  }

  /// The rows of a tile that this block of a cluster has. It goes through all blocks of keys that any row sees.
  __device__ __forceinline__ static void take_rows_of_block(Tile& tile, const tile::Score<config.features>& score,
                                                            tile::TileRange loaded, Attempt attempt) {
    tile.q_begin += static_cast<int>(ptx::cluster_rank()) * wg_rows;
    Blocks seen = blocks_seen(score, loaded, tile.q_begin, attempt);
    if (attempt == Attempt::nonfinite_safe || seen.interior_begin == seen.end)
      seen.interior_begin = seen.interior_end = tile.blocks;
    tile.seen[0] = {0, seen.interior_begin, seen.interior_end, tile.blocks};
  }
};

}  // namespace flash_attention::forward_sm90
