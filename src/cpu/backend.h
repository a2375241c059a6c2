#pragma once

#include <memory>

#include "backend/backend.h"

namespace flash_attention::cpu {

struct KernelTable;

/// The row of the table of backends (src/api/backends.cpp).
extern const Backend backend;

/// The CPU as a device: its instruction set (detected, or forced by the settings), threads and caches.
DeviceInfo info();

/// The kernels for an instruction set. Throws Error(unavailable) where this CPU does not have it.
const KernelTable& kernel_table(CpuIsa isa);

/// The function table of the plan's kernel for that instruction set.
std::unique_ptr<Kernel> load_kernel(const Problem& problem, const Plan& plan, const DeviceInfo& device);

}  // namespace flash_attention::cpu
