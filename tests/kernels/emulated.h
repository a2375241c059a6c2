#pragma once

#include "emulator/seed.h"
#include "support/contract.h"

namespace flash_attention::testing {

/// The case in the emulator, under several schedules.
inline void check_emulated(const Case& c, const char* kernel, Pass pass) {
  for (const std::uint64_t seed : {1, 2}) {
    emulator::set_seed(seed);
    check(c, {.device = {.kind = DeviceKind::emulator, .emulated_arch = 80}, .kernel = kernel, .pass = pass});
  }
}

/// Every fourth case: enough for a second type, whose only difference is how elements are rounded.
inline std::vector<Case> some_of(const std::vector<Case>& cases) {
  std::vector<Case> some;
  for (std::size_t i = 0; i < cases.size(); i += 4) some.push_back(cases[i]);
  return some;
}

}  // namespace flash_attention::testing
