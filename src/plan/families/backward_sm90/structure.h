#pragma once

#include "abi/config.h"
#include "plan/kernel_table.h"

namespace flash_attention::plan {

constexpr int tile_rows = 64;  // queries of a step of backward/sm90, and keys of a warpgroup

/// The structure of backward/sm90 for a problem. docs/lab/backward_sm90.md has the measurements.
struct BackwardSm90Structure {
  bool wide = false;  // dK and dV by two warpgroups together
  abi::DqMode dq_mode = abi::DqMode::atomic;
  int warpgroups = 1;  // of 64 keys each
  int stages = 2;
};

/// whole: for a whole pass, not for a part (parts.cpp).
BackwardSm90Structure choose_backward_sm90_structure(const Request& request, bool whole);

/// Whether three warpgroups have the registers for the options of a problem with heads up to 64.
bool has_registers_for_three(const abi::Features& features);

/// The loop of a launch: how its warpgroups use registers.
abi::BackwardLoop choose_loop(const abi::BackwardConfig& config);

// How its work is divided between tasks -------------------------------------------------------------------------------

/// Whether masks that are data or programs choose the steps of a task.
bool chooses_steps(const abi::Features& features);

/// The number of parts into which a key head's queries are split between tasks: whole heads of the group, and as many
/// parts as needed so that all SMs end together. With more than one, dK and dV are summed in memory.
int num_gqa_splits(const Problem& problem, const DeviceInfo& device, const abi::BackwardConfig& config);

/// Whether neighbouring tasks should have different heads. Otherwise many tiles of keys with few queries would add to
/// the same sums of dQ at the same time. All queries must stay in L2.
bool interleaves_heads(const Problem& problem, const DeviceInfo& device, const abi::BackwardConfig& config);

/// Whether tasks may share the queries of each head's first tile of keys. Masks often show the first keys to all
/// queries (sinks, prefixes, instructions) and other keys to few; the task of such a tile would still run when all
/// others are done. It does not depend on lengths, so that a program is compiled once for all.
bool splits_first(const Problem& problem, const abi::BackwardConfig& config);

}  // namespace flash_attention::plan
