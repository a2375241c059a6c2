#pragma once

#include <cstdint>

namespace flash_attention::emulator {

/// The seed of the schedules of later launches: FLASH_ATTENTION_EMULATOR_SEED, unless a test has set another one.
std::uint64_t seed();
void set_seed(std::uint64_t seed);

/// Sets the number of SMs of the emulated GPU; 0: as many as the real one. With few SMs, persistent kernels take
/// several tiles even in small problems. Later calls have separate plans.
void set_num_sms(int num_sms);

}  // namespace flash_attention::emulator
