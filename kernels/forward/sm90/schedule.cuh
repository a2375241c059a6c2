#pragma once

// The KV blocks that a tile visits if masks choose them: the blocks of which the tile map (abi/tile_map.h) shows something,
// in the order of Shape::forwards. The producer warp reads the map, and publishes the number of each block with its K.

#include "forward/sm90/storage.cuh"
#include "ptx/atomic.cuh"
#include "ptx/bits.cuh"
#include "ptx/cluster.cuh"
#include "ptx/path.cuh"
#include "tile/score.cuh"

namespace flash_attention::forward_sm90 {

template <ForwardConfig config>
struct BlockList {
  using S = Shape<config>;
  static constexpr int units = S::block_kv / mask_unit;  // of a block
  static_assert(!S::listed || S::block_kv % mask_unit == 0, "the planner gives masks blocks of whole units");

  const AttentionArgs& args;
  const Tile& tile;                // for fields that are rarely needed
  int begin, end;                  // blocks that may be listed
  int loaded;                      // the word that is in `found`; -1: none
  TileWords found[S::row_groups];  // of each row group

  /// A list of which no block is known yet.
  __device__ __forceinline__ BlockList(const AttentionArgs& arguments, const Tile& tile_of_list, int word = -1)
      : args(arguments), tile(tile_of_list), begin(tile.list.range.begin), end(tile.list.range.end), loaded(word) {}

  /// A list that begins with the tile's first block; the tile holds the map's words of that block.
  __device__ __forceinline__ static BlockList from_first(const AttentionArgs& args, const Tile& tile) {
    BlockList list(args, tile, tile.first * units / 32);
#pragma unroll
    for (int row = 0; row < S::row_groups; ++row) list.found[row] = tile.list.found[row];
    return list;
  }

  /// The first listed block from `block` on, or -1.
  __device__ __forceinline__ int seek(int block) {
    constexpr int blocks_of_word = 32 / (units > 0 ? units : 1);
#pragma unroll 1
    while (block >= begin && block < end) {
      const unsigned word = static_cast<unsigned>(block) / blocks_of_word;
      const unsigned place_in_word = static_cast<unsigned>(block) % blocks_of_word * units;
      load(static_cast<int>(word));
      unsigned any = 0;  // tiles from the block on
#pragma unroll
      for (const TileWords& row : found) any |= row.seen;
      any &= S::forwards ? 0xffffffffu << place_in_word : 0xffffffffu >> (32 - units - place_in_word);
      const int word_begin = static_cast<int>(word) * blocks_of_word;
      if (any != 0) {
        const int unit = S::forwards ? ptx::trailing_zeros(any) : 31 - ptx::leading_zeros(any);
        block = word_begin + unit / units;
        return block >= begin && block < end ? block : -1;
      }
      block = S::forwards ? word_begin + blocks_of_word : word_begin - 1;
    }
    return -1;
  }
  __device__ __forceinline__ int after(int block) { return seek(S::forwards ? block + 1 : block - 1); }

  /// Describes `block`, which was found last.
  __device__ __forceinline__ ListedBlock describe(int block, Attempt attempt) const {
    constexpr unsigned whole = (1u << units) - 1;
    unsigned seen_by = 0, masked_for = 0;
#pragma unroll
    for (int row = 0; row < S::row_groups; ++row) {
      // In Attempt::nonfinite_safe the warpgroups go through the blocks together.
      const bool together = !S::skips_listed || attempt == Attempt::nonfinite_safe;
      seen_by |= bits(found[row].seen, block) != 0 || together ? 1u << row : 0u;
      masked_for |= bits(found[row].full, block) != whole ? 1u << row : 0u;
    }
    const bool edge = block < tile.list.range.interior_begin || block >= tile.list.range.interior_end;
    return {block, edge, attempt != Attempt::fixed_max, seen_by, masked_for};
  }

 private:
  __device__ __forceinline__ static unsigned bits(unsigned word, int block) {
    return word >> block * units % 32 & ((1u << units) - 1);
  }

  __device__ __forceinline__ void load(int word) {
    if (word == loaded) return;
    loaded = word;
    const TileWords* const rows = tile::workspace<TileWords>(args, SharedRegion::masks) + tile.list.map_row;
    const int words = map_words(args.seq_kv);
    const int last_row = (tile.sequence.rows_q - 1) / mask_unit - tile.q_begin / mask_unit;  // of the map, for this tile
#pragma unroll
    for (int row = 0; row < S::row_groups; ++row)
      found[row] = row <= last_row ? rows[row * words + word] : TileWords{0, 0xffffffffu};
  }
};

/// Calls visit(described) for each block of a tile.
template <ForwardConfig config, typename Visit>
__device__ __forceinline__ void for_listed(const AttentionArgs& args, const Tile& tile, const Visit& visit) {
  if (tile.sees_nothing()) return;
  auto list = BlockList<config>::from_first(args, tile);
  int block = tile.first;
#pragma unroll 1
  while (block >= 0) {
    ListedBlock described = list.describe(block, tile.attempt);
    block = list.after(block);
    if (block < 0) described.word |= ListedBlock::last;
    visit(described);
  }
}

/// Fills in the range from which masks choose, and the first block. tile.blocks only says whether there is any block.
template <ForwardConfig config>
__device__ __forceinline__ void list_blocks(const AttentionArgs& args, Tile& tile,
                                            const tile::Visibility<config.features>& sight, tile::TileRange loaded) {
  constexpr Features features = config.features;
  const int q_last = tile::min(tile.q_begin + config.block_q, sight.len_q) - 1;
  int first = 0, last = sight.visible_kv;
  if constexpr (features.window_right) last = tile::min(last, sight.window_end(tile.q_begin));
  if constexpr (features.left_padding) first = sight.first_kv;
  if constexpr (features.window_left) first = tile::max(sight.window_begin(q_last), first);
  tile.list.range = {loaded.begin, tile::ceil_div(first, config.block_kv), tile::max(last, 0) / config.block_kv,
                     loaded.end};
  tile.list.kv_head = tile.head_idx / args.group;
  const tile::TileMap<features> map(args, tile.sequence, tile.head_idx);
  tile.list.map_row = static_cast<unsigned>(map.rows - tile::workspace<TileWords>(args, SharedRegion::masks)) +
                      tile.q_begin / mask_unit * map.words;
  if constexpr (features.precomputed_mask_bits)
    tile.list.row_tile =
        mask::row_tile_of_words<config.block_q>(args, tile.sequence.batch_idx, tile.head_idx, tile.q_begin);
  BlockList<config> list(args, tile);
  tile.first = list.seek(tile.first);
#pragma unroll
  for (int row = 0; row < Shape<config>::row_groups; ++row) tile.list.found[row] = list.found[row];
  tile.blocks = tile.first < 0 ? 0 : 1;
}

// For the KV blocks that are loaded for a tile: which ones the 64 rows of a warpgroup see, and which of those are
// edges.

/// The block nearest to the diagonal of a query.
template <ForwardConfig config>
__device__ __forceinline__ int block_at_diagonal(const tile::Visibility<config.features>& sight, tile::TileRange loaded,
                                                 int q) {
  const int key = tile::min(q, sight.len_q - 1) + sight.len_kv - sight.len_q;
  return tile::max(tile::min(tile::max(key, 0) / config.block_kv, loaded.end - 1), loaded.begin);
}

/// For ALiBi without a right edge. The first block sets the fixed maximum. It may be so far from the diagonal that keys
/// near the diagonal overflow the row sum, and the tile would be repeated: at 8192 tokens, nearly every tile.
template <ForwardConfig config>
__device__ __forceinline__ bool begins_far_away(const tile::Score<config.features>& score, tile::TileRange loaded,
                                                int q_begin) {
  if constexpr (!config.features.alibi || config.features.window_right || Shape<config>::from_diagonal ||
                Shape<config>::ordered)
    return false;
  constexpr float growth = Shape<config>::type == Type::float16 ? 7.0f : 20.0f;  // of e^11 and e^27: highest_sum
  const int distance = (loaded.end - 1) * config.block_kv - (q_begin + score.sight.len_kv - score.sight.len_q);
  return score.slope * static_cast<float>(distance) > growth;
}

/// The edge blocks are those at the diagonal, which raise the maximum, and the last one if the keys end within it.
template <ForwardConfig config>
__device__ __forceinline__ Blocks blocks_from_diagonal(const tile::Visibility<config.features>& sight,
                                                       tile::TileRange loaded, int q_begin, Attempt attempt) {
  const int q_of_tile = q_begin / config.block_q * config.block_q;
  const int first = block_at_diagonal<config>(sight, loaded, q_of_tile + config.block_q - 1), blocks = loaded.end;
  if (config.features.mask || attempt != Attempt::fixed_max) return {0, blocks, blocks, blocks};
  const bool open = sight.visible_kv % config.block_kv == 0 || first == blocks - 1;
  return {0, first - block_at_diagonal<config>(sight, loaded, q_begin) + 1, open ? blocks : blocks - 1, blocks};
}

template <ForwardConfig config>
__device__ __forceinline__ Blocks blocks_seen(const tile::Visibility<config.features>& sight, tile::TileRange loaded,
                                              int q_begin, Attempt attempt) {
  constexpr Features features = config.features;
  constexpr int block_kv = config.block_kv;
  if constexpr (Shape<config>::from_diagonal) return blocks_from_diagonal<config>(sight, loaded, q_begin, attempt);
  tile::TileRange range = sight.template key_tiles<wg_rows, block_kv>(q_begin);
  if constexpr (config.split_keys)
    range = {tile::max(range.begin, loaded.begin), tile::max(tile::min(range.end, loaded.end), loaded.begin)};
  if (range.begin == range.end) {  // visit one block, all of it hidden
    ptx::path<"forward/sm90 warpgroup without keys">();
    range = {loaded.begin, loaded.begin + 1};
  }
  int first = range.begin;  // the interior, clipped to the range
  int last = sight.visible_kv;
  if constexpr (features.window_right) last = tile::min(last, sight.window_end(q_begin));
  last = tile::min(tile::max(last, 0) / block_kv, range.end);
  if constexpr (features.left_padding) first = tile::max(first, tile::ceil_div(sight.first_kv, block_kv));
  if constexpr (features.window_left) {
    const int q_last = tile::min(q_begin + wg_rows, sight.len_q) - 1;
    first = tile::max(first, tile::ceil_div(tile::max(sight.window_begin(q_last), 0), block_kv));
  }
  // With the running maximum every block is an edge.
  const bool keeps = !Shape<config>::ordered || Shape<config>::keeps_reference;
  if (features.mask || !keeps || attempt != Attempt::fixed_max || first >= last)
    first = last = Shape<config>::forwards ? range.end : range.begin;
  if constexpr (Shape<config>::forwards) {
    return {range.begin - loaded.begin, first - loaded.begin, last - loaded.begin, range.end - loaded.begin};
  } else {
    return {loaded.end - range.end, loaded.end - last, loaded.end - first, loaded.end - range.begin};
  }
}

// The tiles of a thread block, their order, and the keys that each of them sees. The producer warp computes this and
// publishes it to the consumers together with Q.

/// The tiles of this block. In each round every block takes one row tile, and neighbouring blocks take tiles of the same
/// head, so that its keys stay in L2. If the last row tile of a head may be short, a block moves on by one place with each
/// round, so that no block gets only short tiles. With pair_tiles it takes row tile `last - x` and then row tile x: under a
/// causal mask every pair is the same amount of work.
template <ForwardConfig config>
struct Schedule {
  using Unit = typename Shape<config>::Unit;

  const AttentionArgs& args;
  int units_per_head;  // row tiles, or pairs of them
  int num_units;
  int step;  // places that a block moves on with each round
  int num_iterations;
  // dynamic_scheduler: a block claims several neighbouring units at once if it could not remember that many single claims.
  Unit* claimed;  // claimed units, in order
  int next = 0;   // the claimed unit that is begun next
  static constexpr int not_claimed = -1;
  int claim = 1;  // units of a claim
  int num_claims = 0;
  int section;  // number of heads whose keys fit in L2 together

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
      constexpr int l2_bytes = 32 << 20;  // of an H200's 50 MB, for K and V; measured in docs/lab/forward_sm90.md
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

  /// Claims the unit after iteration i, unless an earlier claim includes it. Called some time before the unit is needed.
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
        // A claim beyond the list is not taken; other blocks take the unit. This only happens if a block is alone on the
        // GPU for a while.
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
    if constexpr (config.dynamic_scheduler) {  // longest row tiles first
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

  /// Fills in `tile`, in shared memory because the producer warp has few registers. Returns whether there is a tile.
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
    // If no reference is kept in the fixed order, the first attempt is sound for all scores.
    if (Shape<config>::ordered && !Shape<config>::keeps_reference && attempt == Attempt::online_max)
      attempt = tile.attempt = Attempt::nonfinite_safe;
    tile::TileRange loaded = score.sight.template key_tiles<config.block_q, config.block_kv>(tile.q_begin);
    if constexpr (config.split_keys) loaded = take_split(loaded, tile.split);
    tile.first = Shape<config>::forwards ? loaded.begin
                 : Shape<config>::from_diagonal
                     ? block_at_diagonal<config>(score.sight, loaded, tile.q_begin + config.block_q - 1)
                     : loaded.end - 1;
    tile.blocks = loaded.end - loaded.begin;
    if (attempt == Attempt::fixed_max && begins_far_away<config>(score, loaded, tile.q_begin)) {
      ptx::path<"forward/sm90 tile far from the diagonal">();
      attempt = tile.attempt = Attempt::online_max;
    }
    if constexpr (Shape<config>::listed) list_blocks<config>(args, tile, score.sight, loaded);
    tile.work = tile.sees_nothing()                  ? Work::write_zeros
                : attempt == Attempt::nonfinite_safe ? Work::attend_nonfinite_safe
                                                     : Work::attend;
    if constexpr (Shape<config>::listed) return;
    if constexpr (Shape<config>::cluster > 1) return take_rows_of_block(tile, score.sight, loaded, attempt);
#pragma unroll 1
    for (int w = 0; w < Shape<config>::row_groups; ++w) {
      // In Attempt::nonfinite_safe the warpgroups go through the blocks together.
      tile.seen[w] = attempt == Attempt::nonfinite_safe
                         ? Blocks{0, tile.blocks, tile.blocks, tile.blocks}
                         : blocks_seen<config>(score.sight, loaded, tile.q_begin + w * wg_rows, attempt);
    }
  }

  /// Restricts a tile to this split's share of its blocks.
  __device__ __forceinline__ tile::TileRange take_split(tile::TileRange all, int split) const {
    const int blocks = all.end - all.begin;
    return {all.begin + blocks * split / args.num_splits, all.begin + blocks * (split + 1) / args.num_splits};
  }

  /// Restricts a tile to the rows of this block of the cluster. Both blocks visit all KV blocks that any row of the tile
  /// sees.
  __device__ __forceinline__ static void take_rows_of_block(Tile& tile, const tile::Visibility<config.features>& sight,
                                                            tile::TileRange loaded, Attempt attempt) {
    tile.q_begin += static_cast<int>(ptx::cluster_rank()) * wg_rows;
    Blocks seen = blocks_seen<config>(sight, loaded, tile.q_begin, attempt);
    if (attempt == Attempt::nonfinite_safe || seen.interior_begin == seen.end)
      seen.interior_begin = seen.interior_end = tile.blocks;
    tile.seen[0] = {0, seen.interior_begin, seen.interior_end, tile.blocks};
  }
};

}  // namespace flash_attention::forward_sm90
