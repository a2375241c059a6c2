#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

namespace flash_attention::program {

/// The terms of a mask program that bound i - j, as a window, and the text without them.
struct WindowOfProgram {
  std::int64_t left = -1;   // keys from i - left on; -1: no bound
  std::int64_t right = -1;  // keys up to i + right
  std::string rest;         // empty: nothing is left
};

/// Finds the terms of `visible` that compare i - j with a number. As a window they need no map: kernels know which tiles a
/// window hides, and how long each row tile is. Nothing if there is no such term, or if the program must stay: then
/// it has a gradient to give, or a remaining term has no line.
std::optional<WindowOfProgram> take_window(std::string_view text);

}  // namespace flash_attention::program
