#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

namespace flash_attention::program {

/// What a mask program says of the diagonal j = i alone, as the bounds of a window, and the text without it.
struct WindowOfProgram {
  std::int64_t left = -1;   // keys from i - left on; -1: no bound
  std::int64_t right = -1;  // keys up to i + right
  std::string rest;         // empty: nothing is left
};

/// The terms of `visible` that compare i - j with a number: kernels know which tiles a window hides without a map, and how
/// long each row tile is. Nothing if there is none, or where the text cannot do without it.
std::optional<WindowOfProgram> take_window(std::string_view text);

}  // namespace flash_attention::program
