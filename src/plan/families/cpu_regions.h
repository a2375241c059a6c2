#pragma once

// No includes: the objects of an instruction set see this file.

namespace flash_attention::plan {

/// The regions of a CPU kernel's workspace, by name: indices into Plan::workspace_offsets and Call::workspace_offsets.
/// Names that share a number belong to different kernels.
enum class CpuRegion : int {
  split_sums = 0,         // forward: of O, [split][row][padded head_dim_v]
  split_statistics = 1,   // forward: [split][row][2]
  split_dQ = 0,           // backward, if keys are split: [split][row][padded head_dim]
  key_gradients = 0,      // backward, if queries are split: dK and dV, [split][kv head][key][cpu_sums_stride]
  sink_terms = 2,         // backward: terms of dsink, one for each row
  second_rows = 3,        // cpu/second: three numbers of each row, RowOfSecond of cpu/tangent/second.h
  S = 0,                  // cpu/standard: [kv head][block of rows][key][row]; then P
  dS = 1,                 // cpu/standard: the same
  copied_K = 3,           // cpu/prefill and cpu/backward: as float, the rows of a head one after another
  copied_V = 4,           // the same
  packed_K = 3,           // cpu/bfloat16: [kv head][tile of keys][block_kv][columns]
  packed_Vt = 4,          // its forward: [kv head][tile of keys][columns][block_kv]
  nonfinite_keys = 5,     // its forward: [kv head][tile of keys][block_kv + 1], a byte for each key and one for all
  packed_V = 4,           // its backward: as packed_K
  packed_Kt = 5,          // its backward: [kv head][tile of keys][columns][block_kv]
  nonfinite_tiles = 6,    // its backward: a byte for each tile of keys
  program_gradients = 7,  // cpu/backward
  mass_terms = 9,         // cpu/backward: of each row, the sum of its probabilities times the gradients of key_mass
  masks = 8,              // KeyBounds of every unit: abi/key_bounds.h
  scores_of_row = 0       // ladder/c0_scalar
};

}  // namespace flash_attention::plan
