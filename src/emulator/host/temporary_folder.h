#pragma once

#include <filesystem>

namespace flash_attention::emulator {

/// Of this process and its forks alone: what is there is compiled and run. It is removed at the end, or by the next process
/// if this one is killed. Throws Error(unavailable) if there is none.
const std::filesystem::path& temporary_folder();

}  // namespace flash_attention::emulator
