#pragma once

#include "plan/kernel_table.h"

// The teaching ladder: kernels/ladder/, kernels/ladder/backward/. A rung is a file there and a row of the table in
// ladder.cpp.

namespace flash_attention::plan {

struct Rung {
  std::string_view name;  // "ladder/06_mma"; its entry is `attention`
  Pass pass = Pass::forward;
  int arch = 80;         // the first that has its instructions
  bool float32 = false;  // takes fp32 in addition to the 16-bit types
  int block_q = 0;
  int block_kv = 0;
  int num_warps = 0;
  int num_stages = 1;
  int min_blocks_per_sm = 1;
  bool wgmma = false;       // which only sm_90 has
  bool tma = false;         // copies by TMA: the planner makes tensor maps, and strides must suit them
  bool narrow = false;      // Q, K and V in 8 bits, V transposed by a first launch
  bool persistent = false;  // one block for each SM, which processes several tiles one after another

  /// For a block that computes with rows of head_dim elements; null: none.
  int (*shared_bytes)(const Rung& rung, int head_dim) = nullptr;
  /// Adds launches and workspace; null: one launch of `attention` with a block for each block_q queries of a head.
  void (*add_launches)(const Rung& rung, const Problem& problem, Plan& plan) = nullptr;
};

/// The rungs in order: forward, then backward.
std::span<const Rung> rungs();

/// Its file below kernels/, without the ending: "ladder/06_mma", "ladder/backward/b0_naive".
std::string unit_of(const Rung& rung);

/// A launch of a forward rung.
Launch forward_launch(const Rung& rung, const Problem& problem, std::string entry);

/// Rungs with more than one launch: three whole matrices, V^T before an 8-bit kernel, parts of the keys and their merge.
void add_standard_launches(const Rung& rung, const Problem& problem, Plan& plan);
void add_narrow_launches(const Rung& rung, const Problem& problem, Plan& plan);
void add_split_launches(const Rung& rung, const Problem& problem, Plan& plan);

/// The launches of a backward rung: delta (in the layout of lse), dq, dkv.
void add_backward_launches(const Rung& rung, const Problem& problem, Plan& plan);

/// Why no rung takes the problem; empty if every rung might. A rung's own requirements are in its row.
std::string reject_for_all_rungs(const Request& request);

}  // namespace flash_attention::plan
