#pragma once

#include <optional>
#include <string>

#include "program/program.h"

/// The words of a program's text.
namespace flash_attention::program {

std::optional<Op> operation_of(std::string_view name);  ///< add, sub, ...; nothing for load and leaves
std::optional<Op> index_of(std::string_view name);      ///< score, b, h, i, j
std::optional<Element> element_of(std::string_view name);
std::string operation_names();  ///< all of them, for messages

}  // namespace flash_attention::program
