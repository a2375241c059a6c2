#pragma once

#include "flash_attention/attention.h"
#include "plan/request.h"

namespace flash_attention::plan {

/// What every kernel wants to know of a mask before it begins: a part of the workspace, and on a GPU the launch that fills
/// it (abi/key_bounds.h, abi/tile_map.h).
void prepare_masks(const Request& request, Plan& plan);

/// Of a call whose masks may have been prepared.
std::size_t needed_workspace(const Plan& plan, const PreparedMask& prepared);

/// What is kept of a prepared mask: the end of the workspace, behind a head in which the launch may set a counter to 0.
constexpr std::size_t prepared_head_bytes = 256;
std::size_t prepared_bytes(const Plan& plan);

/// The launch that prepares the masks of a plan, by itself. It takes a prepared mask's memory and no workspace.
Plan preparation(const Plan& plan);

}  // namespace flash_attention::plan
