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

}  // namespace flash_attention::plan
