#pragma once

#include <filesystem>

namespace flash_attention::emulator {

/// Of this user alone: what is there is compiled and run. Throws Error(unavailable) if there is none.
const std::filesystem::path& temporary_folder();

}  // namespace flash_attention::emulator
