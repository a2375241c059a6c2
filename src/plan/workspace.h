#pragma once

#include "abi/workspace.h"
#include "flash_attention/plan.h"

namespace flash_attention::plan {

/// Where a region begins, in bytes. Region: an enum of abi/workspace.h or CpuRegion.
template <class Region>
std::int64_t& offset_of(Plan& plan, Region region) {
  return plan.workspace_offsets[static_cast<std::size_t>(region)];
}
template <class Region>
std::int64_t offset_of(const Plan& plan, Region region) {
  return plan.workspace_offsets[static_cast<std::size_t>(region)];
}

/// Adds a region, in whole units of 256 bytes: what bulk copies and cache lines need.
template <class Region>
void reserve(Plan& plan, Region region, std::int64_t bytes) {
  constexpr std::size_t unit = 256;
  const auto whole = [](std::size_t size) { return (size + unit - 1) / unit * unit; };
  plan.workspace_bytes = whole(plan.workspace_bytes);
  offset_of(plan, region) = static_cast<std::int64_t>(plan.workspace_bytes);
  plan.workspace_bytes += whole(static_cast<std::size_t>(bytes));
}

}  // namespace flash_attention::plan
