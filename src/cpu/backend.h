#pragma once

#include <memory>

#include "backend/backend.h"

namespace flash_attention::cpu {

struct KernelTable;

/// The CPU's row in the table of backends (src/api/backends.cpp).
extern const Backend backend;

/// The CPU as a device: its instruction set (detected, or forced by the settings), threads and caches.
DeviceInfo info();

/// The kernels for an instruction set. Throws Error(unavailable) if this CPU does not have it.
const KernelTable& kernel_table(CpuIsa isa);

/// The plan's kernel, from the function table of that instruction set.
std::unique_ptr<Kernel> load_kernel(const Problem& problem, const Plan& plan, const DeviceInfo& device);

}  // namespace flash_attention::cpu
