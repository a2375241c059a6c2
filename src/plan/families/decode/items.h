#pragma once

#include "abi/config.h"
#include "flash_attention/plan.h"

// What the kernels that share decode/schedule.cuh and decode/merge.cuh have in common.

namespace flash_attention::plan {

/// Rows of a key head: query heads that share it, and tokens.
std::int64_t decode_rows(const Problem& problem);

/// Keys of an item: of a sequence, or of a list.
std::int64_t keys_of_item(const Problem& problem);

/// Rows that may share an item: with lists those of one query.
std::int64_t rows_of_item(const Problem& problem);

/// Tiles of keys of all items; a bound, since lengths are known on the device only.
double decode_tiles(const Problem& problem, const abi::ForwardConfig& config);

/// Tiles of keys of an item; at least one.
std::int64_t tiles_of_item(const Problem& problem, const abi::ForwardConfig& config);

/// Rows of a key head, block_q at a time, of all heads and sequences.
std::int64_t items_of(const Problem& problem, const abi::ForwardConfig& config);

/// Blocks of the grid, at most `most`, and room for the parts of the items that they share. 0 if there is no work.
std::int64_t reserve_decode_parts(const Problem& problem, const abi::ForwardConfig& config, std::int64_t most, Plan& plan);

}  // namespace flash_attention::plan
