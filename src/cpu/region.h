#pragma once

#include "cpu/call.h"
#include "plan/families/cpu_regions.h"

namespace flash_attention::cpu {
namespace {  // the objects of every instruction set have their own

/// The first element of a region of the workspace.
template <class T>
T* region(const Call& call, plan::CpuRegion which) {
  return reinterpret_cast<T*>(call.workspace + call.workspace_offsets[static_cast<int>(which)]);
}

}  // namespace
}  // namespace flash_attention::cpu
