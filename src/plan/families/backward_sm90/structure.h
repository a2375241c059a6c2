#pragma once

#include "abi/config.h"
#include "plan/kernel_table.h"

namespace flash_attention::plan {

constexpr int tile_rows = 64;  // queries of a step of backward/sm90, and keys of a warpgroup

/// How backward/sm90 is built for a problem. docs/lab/backward_sm90.md has the measurements.
struct BackwardSm90Structure {
  bool wide = false;  // dK and dV by two warpgroups together
  abi::DqMode dq_mode = abi::DqMode::atomic;
  int warpgroups = 1;  // of 64 keys each
  int stages = 2;
};

/// whole: of a whole pass, not of a part (parts.cpp).
BackwardSm90Structure choose_backward_sm90_structure(const Request& request, bool whole);

/// Whether three warpgroups of heads up to 64 have the registers for the options of a problem.
bool has_registers_for_three(const abi::Features& features);

/// The loop of a launch: what its warpgroups spend registers on.
abi::BackwardLoop choose_loop(const abi::BackwardConfig& config);

// How its work is divided between tasks -------------------------------------------------------------------------------

/// Masks that are data or programs choose the steps of a task.
bool chooses_steps(const abi::Features& features);

/// In how many parts a key head's queries are split between tasks: whole heads of the group, so many that all SMs end
/// together. dK and dV are then summed in memory.
int num_gqa_splits(const Problem& problem, const DeviceInfo& device, const abi::BackwardConfig& config);

/// Whether neighbouring tasks had better be of different heads. Many tiles of keys on few queries would else add to the
/// same sums of dQ at the same time; all queries must stay in L2.
bool interleaves_heads(const Problem& problem, const DeviceInfo& device, const abi::BackwardConfig& config);

/// Whether tasks may share the queries of each head's first tile of keys. Masks often show the first keys to all queries
/// (sinks, prefixes, instructions) and others to few: such a tile would work on when all others are done. Whatever the
/// lengths are, so that a program is compiled once for all.
bool splits_first(const Problem& problem, const abi::BackwardConfig& config);

}  // namespace flash_attention::plan
