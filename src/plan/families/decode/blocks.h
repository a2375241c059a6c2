#pragma once

#include "abi/config.h"
#include "flash_attention/plan.h"

// How the blocks of decode/sm80 and decode/sm90 share the items.

namespace flash_attention::plan {

/// Blocks of the grid and how they go from item to item: `config` gets item_blocks, one_row_tile, read_once, strided_items,
/// head_grid and tiles_in_flight, `plan` room for parts and its number of splits. 0 if there is no work.
std::int64_t share_decode_items(const Problem& problem, const DeviceInfo& device, abi::ForwardConfig& config, Plan& plan);

}  // namespace flash_attention::plan
