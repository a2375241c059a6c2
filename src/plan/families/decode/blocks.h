#pragma once

#include "abi/config.h"
#include "flash_attention/plan.h"

// How the blocks of decode/sm80 and decode/sm90 share the items.

namespace flash_attention::plan {

/// The number of blocks of the grid, and how they share items: sets item_blocks, one_row_tile, read_once,
/// strided_items, head_grid and tiles_in_flight of `config`, and in `plan` the memory for parts and the number of
/// splits. Returns 0 if there is no work.
std::int64_t share_decode_items(const Problem& problem, const DeviceInfo& device, abi::ForwardConfig& config, Plan& plan);

}  // namespace flash_attention::plan
