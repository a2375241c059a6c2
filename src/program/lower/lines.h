#pragma once

#include <string>
#include <string_view>
#include <vector>

namespace flash_attention::program {

/// The lines of a program's text.
std::vector<std::string_view> lines_of(std::string_view text);

/// The name that a line gives a value to: its first word.
std::string_view name_of_line(std::string_view line);

/// The text without the line of that name. It is not printed anew from nodes: lines before that one keep their numbers,
/// which errors name, and flex_attention finds the user's line by them.
std::string without(std::string_view text, std::string_view name);

}  // namespace flash_attention::program
