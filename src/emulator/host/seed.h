#pragma once

#include <cstdint>

namespace flash_attention::emulator {

/// The seed of the schedules of later launches: FLASH_ATTENTION_EMULATOR_SEED unless a test has set another.
std::uint64_t seed();
void set_seed(std::uint64_t seed);

/// How many SMs the emulated GPU has from now on; 0: as many as the real one. With a few, small problems already make
/// persistent kernels take one tile after another. Calls from now on have plans of their own.
void set_num_sms(int num_sms);

}  // namespace flash_attention::emulator
