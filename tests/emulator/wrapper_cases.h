#pragma once

#include "emulator/wrapper_case.h"

namespace flash_attention::testing {

WrapperCases wrapper_cases();

}  // namespace flash_attention::testing
