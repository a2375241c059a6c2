#pragma once

#include <cstdint>

namespace flash_attention::emulator {

/// The seed of the schedules of later launches: FLASH_ATTENTION_EMULATOR_SEED unless a test has set another.
std::uint64_t seed();
void set_seed(std::uint64_t seed);

}  // namespace flash_attention::emulator
