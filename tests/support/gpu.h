#pragma once

#include <gtest/gtest.h>

#include "flash_attention/device.h"

/// First line of a test that needs a GPU of at least that compute capability.
#define REQUIRE_GPU(needed)                                                                                                \
  do {                                                                                                                     \
    const auto all_devices = ::flash_attention::devices();                                                                 \
    if (all_devices.size() < 2) GTEST_SKIP() << "no NVIDIA GPU here";                                                      \
    if (all_devices[1].arch < (needed)) GTEST_SKIP() << "needs sm_" << (needed) << ", here is sm_" << all_devices[1].arch; \
  } while (false)
