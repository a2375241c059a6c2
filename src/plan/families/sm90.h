#pragma once

#include <string>

#include "plan/kernel_table.h"

// What forward/sm90, backward/sm90, decode/sm90 and the ladder's Hopper rungs share.

namespace flash_attention::plan {

/// Why TMA cannot address a tensor that the pass copies; empty where it can address all.
std::string reject_tma_strides(const Problem& problem, Pass pass);

/// The same of K and V alone, in pages or not.
std::string reject_tma_cache(const Problem& problem);

/// Why no Hopper kernel can take the problem; empty where one might.
std::string reject_sm90(const Problem& problem, const DeviceInfo& device);

/// Keys of a box of TMA out of pages: as many as divide the page and the block of keys.
int rows_of_page_box(const Problem& problem, int block_kv);

KernelEntry sm90_backward_kernel();

}  // namespace flash_attention::plan
