#pragma once

#include "abi/config.h"
#include "flash_attention/plan.h"

// Shared by the kernels that use decode/schedule.cuh and decode/merge.cuh.

namespace flash_attention::plan {

/// Rows of a key head: its query heads times the tokens.
std::int64_t decode_rows(const Problem& problem);

/// Keys of an item: of a sequence, or of a list.
std::int64_t keys_of_item(const Problem& problem, const abi::Features& features);

/// Rows that may share an item. With lists, the rows of one query.
std::int64_t rows_of_item(const Problem& problem, const abi::Features& features);

/// Tiles of keys of all items. A bound, since only the device knows the lengths.
double decode_tiles(const Problem& problem, const abi::ForwardConfig& config);

/// Tiles of keys of an item; at least one.
std::int64_t tiles_of_item(const Problem& problem, const abi::ForwardConfig& config);

/// Items: rows of a key head, block_q at a time, of all heads and sequences.
std::int64_t items_of(const Problem& problem, const abi::ForwardConfig& config);

/// The number of blocks of the grid, at most `most`; reserves memory for the parts of the items that they share.
/// Returns 0 if there is no work.
std::int64_t reserve_decode_parts(const Problem& problem, const abi::ForwardConfig& config, std::int64_t most, Plan& plan);

}  // namespace flash_attention::plan
