#pragma once

#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "support/compile.h"

// What the compile tests of forward/sm90 and backward/sm90 share: the GPU they plan for and the problem they vary.

namespace flash_attention::testing {

inline DeviceInfo h200() {
  return {.device = {.kind = DeviceKind::cuda},
          .name = "H200",
          .arch = 90,
          .num_sms = 132,
          .shared_bytes = 232448,
          .l2_bytes = 50 << 20};
}

inline Problem problem(std::int64_t head_dim, bool causal = true) {
  return {.batch = 2,
          .seq_q = 1024,
          .seq_kv = 1024,
          .heads_q = 8,
          .heads_kv = 2,
          .head_dim = head_dim,
          .dtype = Dtype::bfloat16,
          .causal = causal};
}

}  // namespace flash_attention::testing
