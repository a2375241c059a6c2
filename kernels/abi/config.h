#pragma once

// The configuration that a kernel is compiled for. The planner fills in one of these structs and prints it as C++; the
// generated unit passes it to the kernel as a template argument, so a feature that is off leaves no instruction. Plain
// data: no includes, the same on host and device.

namespace flash_attention::abi {

/// Those from e4m3 on are only for K and V, e4m3 and e5m2 also for Q. The last three are codes of 4 bits.
enum class Type : int { float32, float16, bfloat16, e4m3, e5m2, int8, nvfp4, mxfp4, int4 };

/// Whether elements have 8 bits.
constexpr bool is_narrow(Type type) { return type == Type::e4m3 || type == Type::e5m2 || type == Type::int8; }

/// Codes of 4 bits, two in a byte, whose scales are those of groups of columns.
constexpr bool has_groups(Type type) { return type == Type::nvfp4 || type == Type::mxfp4 || type == Type::int4; }

/// Those options of the contract that change code. Each kernel applies them with `if constexpr`.
struct Features {
  Type dtype = Type::float32;       // q, k, v, out and their gradients; 8-bit q, k and v have their own types
  Type bias_dtype = Type::float32;  // bias and dbias
  bool packed = false;              // cu_seqlens
  bool seqused_q = false;
  bool seqused_kv = false;
  bool key_lengths = false;
  bool left_padding = false;
  bool paged = false;         // K and V are in pages
  bool window_left = false;   // a bound on keys before the diagonal
  bool window_right = false;  // a bound on keys after the diagonal; causal is window_right with a bound of 0
  bool chunk = false;         // a query sees only the keys of its chunk; window_left is on, too
  bool top_left = false;      // the diagonal is j = i
  bool softcap = false;
  bool bias = false;
  bool alibi = false;
  bool mask = false;
  bool dropout = false;
  bool sink = false;
  int hidden_bounds = 0;               // hidden_rows: 1, 2 or 4 numbers for each key
  bool block_mask = false;             // a byte for each block of queries and keys
  bool mask_map = false;               // a boolean mask has a map of tiles: abi/tile_map.h
  bool precomputed_mask_bits = false;  // sm90: an earlier launch has made a bit for each pair; no other mask is on
  bool score_program = false;          // a program changes scores
  bool score_hides = false;            // it may return -inf, which hides the score
  bool mask_program = false;           // a program hides keys
  Type kv_dtype = Type::float32;       // of k and v in 8 or 4 bits; any other type means dtype
  bool kv_scales = false;              // they have scales
  bool token_scales = false;           // one for each row
  bool latent = false;                 // a key is its value, then head_dim - head_dim_v columns of K
  bool narrow_queries = false;         // q is of kv_dtype, too
  bool q_scales = false;               // and has scales
  bool one_product = false;            // float32 on tensor cores: a product is one product of 11-bit numbers, not three
  bool fp32_products = false;          // float32 in the kernels for tensor cores: products are computed on CUDA cores
  bool key_list = false;               // a query sees only the keys of its list
  bool key_set = false;                // of blocks of keys; a block counts only once in a list
  bool max_logit = false;              // forward: the largest score of each row
  bool key_mass = false;               // backward: a gradient flows through it
  bool entropy = false;                // of each row; backward: a gradient flows through it
  bool key_bits = false;               // a bit mask of all keys of a sequence
  bool draft_bits = false;             // a bit mask of the last keys, as many keys as queries
  bool bit_offsets = false;            // offsets say where a sequence's bits begin
  bool sequence_windows = false;       // each sequence has its own window; window_left and window_right are on, too
  int list_bits = 0;                   // sm90: lists of blocks come as bits, each for so many keys (mask/list_map.cuh)
  bool list_of_query = false;          // each query has its own list
  int stacked_heads = 0;               // sm90: a query has so many rows, the heads that share its keys; 0: heads are apart
  int kv_group = 0;                    // 4 bits: columns of K and V that share a scale

  constexpr bool has_window() const { return window_left || window_right; }
  /// Whether a sequence may have fewer rows or keys than the tensors have room for.
  constexpr bool has_lengths() const { return packed || seqused_q || seqused_kv || key_lengths || left_padding; }
  constexpr bool bit_mask() const { return key_bits || draft_bits; }
  constexpr bool has_program() const { return score_program || mask_program; }
  /// Whether a score is more than the dot product times a constant, which softmax folds into its exponent.
  constexpr bool modifies_scores() const { return softcap || bias || alibi || score_program; }
  /// Whether masks that are data or a program are on: hidden rows, blocks, lists of blocks, a mask program.
  constexpr bool has_mask_data() const { return hidden_bounds != 0 || block_mask || mask_program || list_bits != 0; }
  /// Whether there is a map of tiles: abi/tile_map.h.
  constexpr bool has_tile_map() const { return has_mask_data() || mask_map || precomputed_mask_bits; }
  /// Whether keys may be hidden from some queries and not from others.
  constexpr bool hides_keys() const {
    return has_window() || mask || left_padding || score_hides || has_mask_data() || precomputed_mask_bits || key_list ||
           bit_mask();
  }
  /// Statistics of the scores, beside lse.
  constexpr bool has_statistics() const { return max_logit || key_mass || entropy; }
  /// Whether each score is treated by itself: modified, hidden or dropped.
  constexpr bool touches_scores() const { return modifies_scores() || mask || bit_mask() || dropout || has_tile_map(); }
};

/// The element type of K and V.
constexpr Type key_type(const Features& features) {
  return is_narrow(features.kv_dtype) || has_groups(features.kv_dtype) ? features.kv_dtype : features.dtype;
}

/// The element type of Q.
constexpr Type query_type(const Features& features) { return features.narrow_queries ? features.kv_dtype : features.dtype; }

/// The order in which forward/sm90 goes over the blocks of keys of a tile.
enum class KeyOrder : int {
  // from the first block: thread blocks that begin together read the same keys, which L2 then reads from memory only
  // once
  forwards,
  backwards,  // from the last block: the nearest keys are first, and set the reference
  // from the diagonal to the first block, then from there to the last: except at the diagonal, all keys of a block are
  // on one side of it
  from_diagonal
};

/// How the warpgroups of forward/sm90 get the masks, if masks choose blocks.
enum class MaskWords : int {
  none,   // no words: each thread tests its pairs
  own,    // words of bits, which warps of the kernel make (kernels/forward/sm90/mask.cuh)
  given,  // words of bits, which an earlier launch has made (kernels/mask/words.cuh)
};

/// The loop of forward/sm90: the order of the keys, and how registers are used. The planner chooses it
/// (src/plan/families/forward_sm90/loop.cpp).
struct ForwardLoop {
  KeyOrder key_order = KeyOrder::forwards;
  MaskWords mask_words = MaskWords::none;
  bool pingpong = false;         // warpgroups take turns: one issues products while the other computes exponentials
  bool holds_queries = false;    // Q stays in registers
  bool uniform_by_vote = false;  // a vote keeps the lanes of a warp together; otherwise they shuffle what they agree on
  bool keeps_tested = false;     // a block whose pairs are tested may keep the maximum
  bool skips_listed = false;     // a warpgroup skips listed blocks that only the other one sees

  friend constexpr bool operator==(const ForwardLoop&, const ForwardLoop&) = default;
};

struct ForwardConfig {
  Features features{};
  int head_dim = 0;  // of the tensors; tiles round up
  int head_dim_v = 0;
  int block_q = 0;   // query rows of a tile
  int block_kv = 0;  // key rows of a tile
  int num_warps = 0;
  int num_stages = 1;  // K/V tiles in flight
  int group = 1;       // heads_q / heads_kv if the kernel packs them, otherwise 1
  // decode, sm90: sums are in a fixed order, in segments of this many tiles; 0: in any order
  int split_tiles = 0;
  bool producer_warp = false;  // decode: separate warps load, by TMA
  bool pair_tiles = false;     // sm90: a block takes a long and a short row tile alternately
  bool row_grid = false;       // decode: blockIdx.y is the tile of rows
  int key_groups = 1;          // decode: this many groups of warps take the tiles of keys alternately
  bool strided_items = false;  // decode: a block takes whole items, gridDim.x apart
  bool one_row_tile = false;   // decode: no key head has more rows than a tile
  // decode: each item has this many blocks, with TMA a cluster; 0: blocks share all tiles evenly
  int item_blocks = 0;
  bool read_once = false;          // decode: no two items read the same keys
  bool head_grid = false;          // decode: blockIdx.y is the key head
  int tiles_in_flight = 0;         // decode: this many stages are loaded at a time; 0: all empty stages
  bool dynamic_scheduler = false;  // sm90: blocks take the longest row tile that is left, by a counter in the workspace
  int page_rows = 0;               // sm90: keys of a TMA box, if keys are in pages
  int bias_stages = 0;             // sm90: tiles of biases in flight, by TMA; 0: each thread loads its own biases
  bool late_values = false;        // tangent/sm90: products of values run under the softmax of the next block of keys
  bool split_keys = false;         // sm90: several work tiles share the keys of a row tile; their parts are merged
  ForwardLoop loop{};              // sm90
  bool transposes_late = false;    // sm90_fp8: idle warps transpose V of later heads while tiles are computed
};

/// Whether the order of a row's sums depends only on its keys: docs/numerics.md, "Invariant bits".
constexpr bool has_fixed_order(const ForwardConfig& config) { return config.split_tiles > 0; }

/// How the terms of dQ, one for each tile of keys, are added up.
enum class DqMode : int {
  atomic,           // each is added to sums in memory, in any order
  ordered,          // the same in a fixed order: every run has the same bits
  separate_kernel,  // a second kernel goes over the keys of each query tile: no sums in memory
  direct            // there is only one tile of keys: its term is dQ
};

/// How the steps of backward/sm90 overlap.
enum class Overlap : int {
  pairs,     // two steps an iteration: S of the next step is issued before dK of this one is done
  steps,     // one step an iteration: dP runs while P is computed
  serial_dP  // dP is computed after P, and P is given up before dS is made: fewest registers
};

/// The loop of backward/sm90: how it uses registers. The planner chooses it
/// (src/plan/families/backward_sm90/structure.cpp).
struct BackwardLoop {
  Overlap overlap = Overlap::steps;
  bool late_statistics = false;  // lse and delta are loaded when P and dS are computed, not before
  bool tests_cap = false;        // if all scores of a tile are far below the soft cap, a polynomial computes tanh

  friend constexpr bool operator==(const BackwardLoop&, const BackwardLoop&) = default;
};

struct BackwardConfig {
  Features features{};
  int head_dim = 0;
  int head_dim_v = 0;
  int block_q = 0;
  int block_kv = 0;
  int num_warps = 0;
  int num_stages = 1;
  DqMode dq_mode = DqMode::atomic;
  bool key_sums = false;  // sm90: several tasks share the queries of a key head; dK and dV are summed in memory
  bool dlse = true;       // a gradient flows through lse
  bool dbias = false;
  bool dsink = false;
  bool bias_boxes = false;             // sm90: TMA loads the biases of a step with its queries
  bool interleave_heads = false;       // sm90: neighbouring tasks have different heads
  bool split_first = false;            // sm90: tasks may share the queries of each head's first tile of keys
  bool statistics_by_product = false;  // sm90: the products of S and dP also subtract the row statistics
  bool early_dq = false;               // sm90: blocks convert dQ of early heads while they compute later ones
  bool mask_bits = false;              // sm90: an earlier launch has made words of the tiles that masks show in part
  BackwardLoop loop{};                 // sm90
};

}  // namespace flash_attention::abi
