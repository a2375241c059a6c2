#pragma once

// Sizes that the planner and the CPU kernels agree on. No includes: the objects of an instruction set see this file, and its
// functions are static, so that no other object calls the one that was compiled for AVX-512.

namespace flash_attention::plan {

constexpr int cpu_block_kv = 64;     // keys of a score tile: with 48 queries, 12 KB that stay in L1
constexpr int cpu_decode_rows = 24;  // the most query rows of a key head that cpu/decode takes; a block has as many
constexpr int cpu_backward_decode_rows = 8;
constexpr int cpu_max_head_dim = 576;    // max_head_dim of flash_attention/problem.h
constexpr int cpu_blocks_together = 4;   // the most blocks of queries that go over the keys together
constexpr int cpu_invariant_splits = 4;  // backward with invariant bits: of a key head's blocks of queries
// backward: if a key head has no more blocks, they go over the keys together, and its keys are split
constexpr int cpu_blocks_of_a_head = 2;

constexpr int cpu_decode_stack = 128;  // rows of all key heads that cpu/decode keeps at once

/// Query rows of a key head in cpu/decode, in groups of 8, 4, 2 and 1. Three rows are padded to four, which cost less
/// than two groups, because those would read K and V twice.
static constexpr int cpu_decode_padded(long long rows) { return static_cast<int>(rows % 4 == 3 ? rows + 1 : rows); }

// The cache of a core for which the thresholds of bytes were tuned, on a Zen 4 (1 MB) and a Xeon (2 MB). The same
// values won on both. So a larger cache counts as this one, and a smaller one lowers the thresholds in proportion.
constexpr long long cpu_tuned_core_cache = 1 << 20;

/// The largest size of K and V of a sequence that stay in the caches.
static constexpr long long cpu_cache_resident_bytes(long long core_cache) { return core_cache / 2 * 3; }

/// Key heads that cpu/decode reads together, tile by tile: all heads whose rows are adjacent, so that memory is read in
/// order. If K and V of a sequence stay in the caches, or are too short to be split, threads share the heads instead.
/// key_bytes: of K and V for one key, all heads. cache_resident_bytes: cpu_cache_resident_bytes. At least 1.
static constexpr int cpu_decode_heads(long long rows, long long heads_kv, long long seq_kv, long long key_bytes,
                               long long cache_resident_bytes, bool side_by_side) {
  const long long most = cpu_decode_stack / (rows > 0 ? cpu_decode_padded(rows) : 1), groups = (heads_kv + most - 1) / most;
  const bool apart = !side_by_side || seq_kv < 8 * cpu_block_kv || seq_kv * key_bytes <= cache_resident_bytes;
  return static_cast<int>(apart || groups == 0 ? 1 : (heads_kv + groups - 1) / groups);
}

// Query rows of a block: the lanes of a register tile's vectors.
constexpr int cpu_block_q_generic = 8;
constexpr int cpu_block_q_neon = 12;
constexpr int cpu_block_q_avx2 = 24;
constexpr int cpu_block_q_avx512 = 48;

// cpu/bfloat16: with fewer rows, packing K and V costs more than it saves.
constexpr int cpu_bfloat16_min_rows = 17;
constexpr int cpu_amx_min_rows = 5;  // forward with AMX
constexpr int cpu_bfloat16_min_keys = 17;
constexpr int cpu_bfloat16_min_scores = 576;  // of a key head

// cpu/bfloat16 with AMX: tiles of 16 x 16 scores, two by two. The keys of a tile share one load of the sums of the
// output.
constexpr int cpu_amx_block_q = 64;
constexpr int cpu_amx_block_kv = 128;

// cpu/bfloat16 with AVX512-BF16.
constexpr int cpu_avx512_bf16_block_kv = 64;

/// Floats from one row of a copy of K or V to the next: one cache line longer than the row, so that the rows of a tile
/// are in different sets of a cache.
static constexpr long long cpu_copied_stride(long long head_dim) { return (head_dim + 15) / 16 * 16 + 16; }

/// Places for units of `unit` rows, if each sequence begins a new unit. A packed sequence begins at place (first row) /
/// unit + (number of the sequence): this is enough for all, however long each is.
static constexpr long long cpu_places(bool packed, long long batch, long long seq, long long total, long long unit) {
  return packed ? total / unit + batch : batch * ((seq + unit - 1) / unit);
}

constexpr int cpu_key_unit = 16;  // keys whose sums of dK and dV are adjacent: a kernel may write this many

/// Columns of a row of floats in a workspace: whole vectors on every instruction set.
static constexpr long long cpu_padded(long long size) { return (size + 15) / 16 * 16; }

/// Floats from the sums of dK and dV of one key to the sums of the next: one cache line longer, as above. At head_dim
/// 256 the products that add to them take 6 % less time on a Zen 4.
static constexpr long long cpu_sums_stride(long long head_dim, long long head_dim_v) {
  return cpu_padded(head_dim) + cpu_padded(head_dim_v) + 16;
}

}  // namespace flash_attention::plan
