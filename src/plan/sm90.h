#pragma once

#include <string>

#include "plan/kernel_table.h"

// What forward/sm90 and backward/sm90 share.

namespace flash_attention::plan {

/// Why TMA cannot address a tensor; empty where it can. Dimensions of one need no stride.
std::string reject_tma_strides(const Problem& problem, const char* name, const Strides& strides, std::int64_t rows,
                               std::int64_t heads);

/// Why no Hopper kernel can take the problem; empty where one might.
std::string reject_sm90(const Problem& problem, const DeviceInfo& device);

KernelEntry sm90_backward_kernel();

}  // namespace flash_attention::plan
