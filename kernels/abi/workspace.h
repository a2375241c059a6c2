#pragma once

// The regions of a workspace, by name: indices into AttentionArgs::workspace_offsets and Plan::workspace_offsets. A
// plan has the regions of one kernel family, and those that all families share. Plain data: no includes, the same on
// host and device.

namespace flash_attention::abi {

constexpr int max_regions = 10;

/// Regions of every family on a GPU.
enum class SharedRegion : int {
  list_bits = 7,         // of lists of blocks: tile/list_bits.cuh. With them backward/sm90 has no order and no words
  masks = 8,             // a map of tiles: abi/tile_map.h
  program_gradients = 9  // backward: sums of the gradients of a program's tensors
};

/// For every backward pass on a GPU that reads delta in the layout of lse; backward/sm90 needs it only for dbias and
/// dsink.
enum class BackwardRegion : int { delta = 0 };

/// Of second derivatives, beside delta: lse. and R of each row, in the layout of lse.
enum class SecondRegion : int { lse_tangent = 1, rest = 2 };

/// Sums of all keys: backward/mla_sm90.cuh.
enum class BackwardMlaRegion : int { dK = 1, dV = 2 };

/// The inverse of lists of keys: backward/listed.cuh.
enum class BackwardListedRegion : int { counts = 1, begins = 2, lists = 3 };

/// Whole tiles of fp32: backward/query_sums.cuh.
enum class BackwardSm80Region : int { dQ = 1 };

/// Statistics and sums of padded rows: backward/sm90/parts/shape.cuh.
enum class BackwardSm90Region : int {
  lse2 = 1,
  delta = 2,
  dQ = 3,          // sums
  tasks = 4,       // counters of tasks taken
  dK = 5,          // sums
  dV = 6,          // sums
  order = 7,       // the block that may add next: backward/sm90/parts/ordered_sums.cuh
  mask_words = 7,  // mask/mask_bits.cuh; if masks choose the steps there is no order
  parts = 8        // of statistics: backward/sm90/parts/statistics.cuh
};

/// For each split of a row's keys, O and statistics: forward/sm90/merge.cuh. Words of masks that all heads share:
/// mask/words.cuh. Outputs of segments, for each block: forward/sm90/ordered_loop.cuh.
enum class ForwardSm90Region : int { O = 0, statistics = 1, mask_words = 2, totals = 3 };

/// V^T, and with transposes_late how far it is: a counter of jobs that are taken, then for each head of keys one of jobs that
/// are done (forward/sm90_fp8/transpose_jobs.cuh).
enum class ForwardSm90Fp8Region : int { transposed_V = 0, progress = 1 };

/// The data that blocks with a common item exchange: decode/merge.cuh.
enum class DecodeRegion : int {
  arrivals = 0,     // a word for each block
  parts = 1,        // two parts for each block, or as many for both as an item may have
  second_part = 2,  // the place of a block's second part
  second_block = 3  // the place of the second block's first part
};

/// Whole score matrices: standard/matrices.cuh.
enum class StandardRegion : int { S = 1, dP = 2, P = 3, dS = 4 };

/// ladder/d0_split: for each split.
enum class LadderSplitRegion : int { O = 0, lse = 1 };

}  // namespace flash_attention::abi
