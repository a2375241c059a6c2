#pragma once

#include <vector>

#include "flash_attention/append.h"
#include "flash_attention/plan.h"
#include "flash_attention/problem.h"

namespace flash_attention::cli {

/// A call that `compile --common` prepares.
struct CommonCall {
  Problem problem;
  Pass pass;
};

/// What most models ask for: training and inference, the usual widths, full and causal, packed, and decoding from a cache.
/// A kernel's configuration follows from sizes, too: the calls are those of a grid of batches, heads and lengths that need
/// different kernels on the device.
std::vector<CommonCall> common_calls(const DeviceInfo& device);

/// The part of it that wheels carry (`compile --core`): 16 bits at head dimensions 64 and 128, full and causal from
/// 512 queries on, backward in bfloat16, decoding, and forward with boolean masks in bfloat16 at 128.
std::vector<CommonCall> core_calls(const DeviceInfo& device);

/// New rows for the caches of such models: dense and in pages, without a rotary embedding and with either pairing.
std::vector<AppendProblem> common_appends();

}  // namespace flash_attention::cli
