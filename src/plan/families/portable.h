#pragma once

#include <string>

#include "abi/config.h"
#include "flash_attention/plan.h"

// Parts of a plan that several families of CUDA kernels share.

namespace flash_attention::plan {

constexpr int portable_shared_bytes = 2 * 64 * 68 * 4;  // the chunks of a product, and a tile of weights

/// Why no kernel with a one-dimensional grid of tiles can take the problem; empty if one can.
std::string reject_grid(const Problem& problem);

/// Appends a launch of `blocks` blocks, unless that is 0.
void add_launch(Plan& plan, Launch launch, std::int64_t blocks);

/// Adds the launch before a forward kernel that raises the largest score of each head: it sets them to -inf.
void add_max_logit_launch(const Problem& problem, Plan& plan);

/// Adds the key masses after a forward kernel.
void add_key_mass_launch(const Problem& problem, Plan& plan);

/// The configuration of the kernels in backward/portable, backward/delta and backward/dbias.
abi::BackwardConfig portable_backward_config(const Problem& problem);

/// BackwardRegion::delta: one float for each row and head, in the layout of lse.
void reserve_row_delta(const Problem& problem, Plan& plan);

/// Fills in delta, including the terms of key masses that have gradients.
void add_delta_launch(const Problem& problem, Plan& plan);

/// Adds dbias, if the problem has a bias: with mma.sync if the operands are those of backward/sm80, otherwise on CUDA
/// cores. It needs delta.
void add_bias_launch(const Problem& problem, Plan& plan);
void add_sm80_bias_launch(const Problem& problem, const DeviceInfo& device, Plan& plan);

/// Adds dbias on CUDA cores and dsink, if the problem has them, by entries of any unit.
void add_bias_launch(const Problem& problem, std::string unit, std::string entry, Plan& plan);
void add_sink_launch(const Problem& problem, std::string unit, std::string entry, Plan& plan);

/// Adds the gradients of a program's tensors and dsink, if the problem has them. They need delta.
void add_program_and_sink_launches(const Problem& problem, Plan& plan);

}  // namespace flash_attention::plan
