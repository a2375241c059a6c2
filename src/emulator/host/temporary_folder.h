#pragma once

#include <filesystem>

namespace flash_attention::emulator {

/// A folder that only this process and its forks can write, because its files are compiled and run. It is removed at
/// the end, or by the next process if this one is killed. Throws Error(unavailable) if none can be made.
const std::filesystem::path& temporary_folder();

}  // namespace flash_attention::emulator
