#pragma once

// What a kernel is compiled for. The planner fills one of these, prints it as C++ and the generated unit passes it as a
// template value, so a feature that is off leaves no instruction behind. Plain data: no includes, the same on host and
// device.

namespace flash_attention::abi {

/// The last three are for K and V alone, e4m3 and e5m2 for Q, too.
enum class Type : int { float32, float16, bfloat16, e4m3, e5m2, int8 };

/// 8 bits an element.
constexpr bool is_narrow(Type type) { return type == Type::e4m3 || type == Type::e5m2 || type == Type::int8; }

/// The options of the contract that change code. Each kernel applies them with `if constexpr`.
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
  bool chunk = false;         // a query sees the keys of its chunk alone; window_left is on, too
  bool top_left = false;      // the diagonal is j = i
  bool softcap = false;
  bool bias = false;
  bool alibi = false;
  bool mask = false;
  bool dropout = false;
  bool sink = false;
  int hidden_bounds = 0;               // hidden_rows: 1, 2 or 4 numbers a key
  bool block_mask = false;             // a byte for each block of queries and keys
  bool mask_map = false;               // there is a map of the tiles of a boolean mask: abi/tile_map.h
  bool precomputed_mask_bits = false;  // sm90: an earlier launch has made a bit for each pair; no other mask is on
  bool score_program = false;          // a program changes scores
  bool score_hides = false;            // it may make one -inf, which is hidden
  bool mask_program = false;           // a program hides keys
  Type kv_dtype = Type::float32;       // of 8-bit k and v; any other means dtype
  bool kv_scales = false;              // they have scales
  bool token_scales = false;           // of rows
  bool latent = false;                 // a key is its value, then head_dim - head_dim_v columns of K
  bool narrow_queries = false;         // q is of kv_dtype, too
  bool q_scales = false;               // and has scales
  bool one_product = false;            // float32 on tensor cores: a product is one of 11 bits each, not three
  bool fp32_products = false;          // float32 in the kernels for tensor cores: products are on CUDA cores
  bool key_list = false;               // a query sees the keys of its list alone
  bool key_set = false;                // of blocks of keys, in which one counts once
  bool max_logit = false;              // forward: the largest score of each row
  bool key_mass = false;               // backward: a gradient flows through it
  bool entropy = false;                // of each row; backward: a gradient flows through it
  bool key_bits = false;               // a bit mask of all keys of a sequence
  bool draft_bits = false;             // a bit mask of the last keys, as many as there are queries
  bool bit_offsets = false;            // offsets say where a sequence's bits begin
  bool sequence_windows = false;       // sequences have windows of their own; window_left and window_right are on, too

  constexpr bool has_window() const { return window_left || window_right; }
  /// The rows or keys of a sequence may be fewer than those of the tensors.
  constexpr bool has_lengths() const { return packed || seqused_q || seqused_kv || key_lengths || left_padding; }
  constexpr bool bit_mask() const { return key_bits || draft_bits; }
  constexpr bool has_program() const { return score_program || mask_program; }
  /// A score is more than the dot product times a constant, which softmax folds into its exponent.
  constexpr bool modifies_scores() const { return softcap || bias || alibi || score_program; }
  /// Masks that are data or a program: hidden rows, blocks, pairs that a program hides.
  constexpr bool has_mask_data() const { return hidden_bounds != 0 || block_mask || mask_program; }
  /// There is a map of tiles: abi/tile_map.h.
  constexpr bool has_tile_map() const { return has_mask_data() || mask_map || precomputed_mask_bits; }
  /// Keys may be hidden from some queries and not from others.
  constexpr bool hides_keys() const {
    return has_window() || mask || left_padding || score_hides || has_mask_data() || precomputed_mask_bits || key_list ||
           bit_mask();
  }
  /// Statistics of the scores, beside lse.
  constexpr bool has_statistics() const { return max_logit || key_mass || entropy; }
  /// Something is done to each score by itself: it is modified, hidden or dropped.
  constexpr bool touches_scores() const { return modifies_scores() || mask || bit_mask() || dropout || has_tile_map(); }
};

/// The elements of K and V.
constexpr Type key_type(const Features& features) {
  return is_narrow(features.kv_dtype) ? features.kv_dtype : features.dtype;
}

/// The elements of Q.
constexpr Type query_type(const Features& features) { return features.narrow_queries ? features.kv_dtype : features.dtype; }

/// In which order forward/sm90 goes over the blocks of keys of a tile.
enum class KeyOrder : int {
  forwards,      // from the first one: blocks that begin together read the same keys, and L2 is asked once for several
  backwards,     // from the last one: the nearest keys come first, and give the reference
  from_diagonal  // from the diagonal to the first one, then from there to the last: all but the blocks at the diagonal are
                 // on one side of it
};

/// How masks that choose blocks come to the warpgroups of forward/sm90.
enum class MaskWords : int {
  none,   // each thread tests its pairs
  own,    // as words of bits, which warps of the kernel make (kernels/forward/sm90/mask.cuh)
  given,  // as words of bits, which a launch before has made (kernels/mask/words.cuh)
};

/// The loop of forward/sm90: in which order it goes over the keys, and what it spends registers on. The planner chooses it
/// (src/plan/families/forward_sm90/loop.cpp).
struct ForwardLoop {
  KeyOrder key_order = KeyOrder::forwards;
  MaskWords mask_words = MaskWords::none;
  bool pingpong = false;         // warpgroups take turns: one has products while the other has exponentials
  bool holds_queries = false;    // Q stays in registers
  bool uniform_by_vote = false;  // a vote keeps the lanes of a warp together; else they shuffle what they agree on
  bool keeps_tested = false;     // a block whose pairs are tested may keep the maximum
  bool skips_listed = false;     // a warpgroup skips listed blocks that only another one sees

  friend constexpr bool operator==(const ForwardLoop&, const ForwardLoop&) = default;
};

struct ForwardConfig {
  Features features{};
  int head_dim = 0;  // of the tensors; tiles round up
  int head_dim_v = 0;
  int block_q = 0;   // query rows of a tile
  int block_kv = 0;  // key rows of a tile
  int num_warps = 0;
  int num_stages = 1;          // K/V tiles in flight
  int group = 1;               // heads_q / heads_kv where the kernel packs them, else 1
  int split_tiles = 0;         // decode, sm90: sums are in a fixed order, in segments of so many tiles; 0 = in any order
  bool producer_warp = false;  // decode: separate warps load, by TMA
  bool pair_tiles = false;     // sm90: a block takes a long and a short row tile in turn
  bool row_grid = false;       // decode: blockIdx.y is the tile of rows
  int key_groups = 1;          // decode: so many groups of warps take the tiles of keys in turn
  bool strided_items = false;  // decode: a block's items are as far apart as the grid has blocks, all of them whole
  bool one_row_tile = false;   // decode: no key head has more rows than a tile
  int item_blocks = 0;      // decode: each item has so many blocks, with TMA a cluster; 0: shares go on from item to item
  bool read_once = false;   // decode: no two items have the same keys
  bool head_grid = false;   // decode: blockIdx.y is the key head
  int tiles_in_flight = 0;  // decode: so many of the stages are loaded at a time; 0: all that are empty
  bool dynamic_scheduler = false;  // sm90: blocks take the longest row tile that is left, by a counter in the workspace
  int page_rows = 0;               // sm90: keys of a box of TMA, where they are in pages
  int bias_stages = 0;             // sm90: tiles of biases in flight, by TMA; 0: each thread loads its own
  bool split_keys = false;         // sm90: several work tiles share the keys of a row tile; their parts are merged
  ForwardLoop loop{};              // sm90
};

/// Sums of a row are in the order that its keys alone decide: docs/numerics.md, "Invariant bits".
constexpr bool has_fixed_order(const ForwardConfig& config) { return config.split_tiles > 0; }

/// How the tiles of keys, each of which has a term of dQ, come to its sum.
enum class DqMode : int {
  atomic,           // each adds to sums in memory, in any order
  ordered,          // the same in one order: every run has the same bits
  separate_kernel,  // a separate kernel goes over the keys of each query tile: no sums in memory
  direct            // there is one tile of keys: its term is dQ
};

/// How the steps of backward/sm90 overlap.
enum class Overlap : int {
  pairs,     // two steps an iteration: S of the next one is issued before dK of this one is waited for
  steps,     // dP is computed while P is made
  serial_dP  // dP is computed after P, and P is given up before dS is made: fewest registers
};

/// The loop of backward/sm90: what it spends registers on. The planner chooses it
/// (src/plan/families/backward_sm90/structure.cpp).
struct BackwardLoop {
  Overlap overlap = Overlap::steps;
  bool late_statistics = false;  // lse and delta are loaded when P and dS are made, not before
  bool tests_cap = false;        // a tile whose scores are far below the soft cap has a polynomial for its tanh

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
  bool bias_boxes = false;             // sm90: TMA brings the biases of a step with its queries
  bool interleave_heads = false;       // sm90: neighbouring tasks are of different heads
  bool split_first = false;            // sm90: tasks may share the queries of each head's first tile of keys
  bool statistics_by_product = false;  // sm90: S and dP come out of their products less the rows' statistics
  bool mask_bits = false;              // sm90: a launch before has made words of the tiles that masks show in part
  BackwardLoop loop{};                 // sm90
};

}  // namespace flash_attention::abi
