#pragma once

#include "flash_attention/plan.h"

namespace flash_attention::plan {

/// Whether a kernel on a GPU reads a map of tiles: hidden rows, a block mask, or a program that hides keys.
bool has_tile_map(const Problem& problem);

/// Whether the rows or keys of a sequence may be fewer than those of the tensors.
bool has_lengths(const Problem& problem);

/// Query heads, or groups of them, and batch entries whose masks differ.
std::int64_t map_heads(const Problem& problem);
std::int64_t map_batches(const Problem& problem);

/// What every kernel wants to know of a mask before it begins: a part of the workspace, and on a GPU the launch that fills
/// it (abi/key_bounds.h, abi/tile_map.h).
void prepare_masks(const Problem& problem, Plan& plan);

}  // namespace flash_attention::plan
