#pragma once

#include "abi/args.h"
#include "abi/workspace.h"

namespace flash_attention::tile {

/// The first element of a region of the workspace.
template <typename T, typename Region>
__device__ __forceinline__ T* workspace(const abi::AttentionArgs& args, Region region) {
  return reinterpret_cast<T*>(static_cast<char*>(args.workspace) + args.workspace_offsets[static_cast<int>(region)]);
}

}  // namespace flash_attention::tile
