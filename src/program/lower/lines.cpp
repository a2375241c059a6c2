#include "program/lower/lines.h"

#include <algorithm>

namespace flash_attention::program {

std::vector<std::string_view> lines_of(std::string_view text) {
  std::vector<std::string_view> lines;
  for (std::size_t begin = 0; begin <= text.size();) {
    const std::size_t end = std::min(text.find('\n', begin), text.size());
    lines.push_back(text.substr(begin, end - begin));
    begin = end + 1;
  }
  return lines;
}

std::string_view name_of_line(std::string_view line) {
  const std::size_t begin = std::min(line.find_first_not_of(" \t"), line.size());
  return line.substr(begin, line.find_first_of(" \t=", begin) - begin);
}

std::string without(std::string_view text, std::string_view name) {
  std::string rest;
  for (const std::string_view line : lines_of(text)) {
    if (name_of_line(line) != name) rest += std::string(line) + "\n";
  }
  if (!rest.empty()) rest.pop_back();
  return rest;
}

}  // namespace flash_attention::program
