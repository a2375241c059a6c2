#pragma once

#include "flash_attention/attention.h"
#include "plan/request.h"

namespace flash_attention::plan {

/// Adds what every kernel needs to know of a mask before it begins: a region of the workspace, and on a GPU the launch
/// that fills it (abi/key_bounds.h, abi/tile_map.h).
void prepare_masks(const Request& request, Plan& plan);

/// The workspace of a call whose masks may have been prepared.
std::size_t needed_workspace(const Plan& plan, const PreparedMask& prepared);

/// The memory of a prepared mask is the end of the workspace, after a head in which the launch may set a counter to 0.
constexpr std::size_t prepared_head_bytes = 256;
std::size_t prepared_bytes(const Plan& plan);

/// Only the launch that prepares the masks of a plan. It uses a prepared mask's memory and no workspace.
Plan preparation(const Plan& plan);

}  // namespace flash_attention::plan
