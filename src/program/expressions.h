#pragma once

#include <cstdint>
#include <functional>
#include <string>

#include "program/program.h"

/// Values of a program as expressions of its CUDA source.
namespace flash_attention::program {

/// The name of a node.
using NodeName = std::function<std::string(int)>;

/// "v3".
std::string value(int node);

/// The bits of a literal.
std::string hexadecimal(std::uint32_t bits);

/// A node as an expression of numbers.
std::string number(const Program& program, const Node& node, const NodeName& name);

/// A node as an expression of ranges. by_lanes: neighbouring lanes have the same ranges, and read
/// tensors together.
std::string range(const Program& program, const Node& node, bool by_lanes = false);

}  // namespace flash_attention::program
