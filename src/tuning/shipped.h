#pragma once

#include <span>
#include <string_view>

namespace flash_attention::tuning {

/// The files of src/plan/tuned/, which are a part of the library: written by cmake/embed_tuned.cmake.
std::span<const std::string_view> shipped_files();

}  // namespace flash_attention::tuning
