#pragma once

#include "emulator/wrapper_case.h"

namespace flash_attention::testing {

/// Made once: the products of large tiles take a moment.
const WrapperCases& wrapper_cases();

}  // namespace flash_attention::testing
