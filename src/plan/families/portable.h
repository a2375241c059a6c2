#pragma once

#include <string>

#include "abi/config.h"
#include "flash_attention/plan.h"

// Pieces of a plan that several CUDA kernel families share.

namespace flash_attention::plan {

constexpr int portable_shared_bytes = 2 * 64 * 68 * 4;  // the chunks of a product, and a tile of weights

/// Why no kernel with a one-dimensional grid of tiles can take the problem; empty where it can.
std::string reject_grid(const Problem& problem);

/// Appends a launch of `blocks` blocks, unless that is 0.
void add_launch(Plan& plan, Launch launch, std::int64_t blocks);

/// Before a forward kernel that raises the largest score of each head: they begin at -inf.
void add_max_logit_launch(const Problem& problem, Plan& plan);

/// Behind a forward kernel: key masses.
void add_key_mass_launch(const Problem& problem, Plan& plan);

/// The configuration of the kernels in backward/portable, backward/delta and backward/dbias.
abi::BackwardConfig portable_backward_config(const Problem& problem);

/// BackwardRegion::delta: one float for each row and head, in the layout of lse.
void reserve_row_delta(const Problem& problem, Plan& plan);

/// Fills it, key masses that have gradients included.
void add_delta_launch(const Problem& problem, Plan& plan);

/// dbias, where the problem has a bias: on CUDA cores, or with mma.sync where the operands are what backward/sm80 takes.
/// It needs delta.
void add_bias_launch(const Problem& problem, Plan& plan);
void add_sm80_bias_launch(const Problem& problem, const DeviceInfo& device, Plan& plan);

/// The gradients of a program's tensors and dsink, where the problem has them. They need delta.
void add_program_and_sink_launches(const Problem& problem, Plan& plan);

}  // namespace flash_attention::plan
