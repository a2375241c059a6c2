#pragma once

#include <string>

#include "program/program.h"

namespace flash_attention::program {

/// CUDA source of a program: a specialisation of tile::Program, which comes before the kernel. gradients: bit n, whether
/// the derivative by tensor n is wanted.
std::string cuda_source(const Program& program, std::uint32_t gradients);

}  // namespace flash_attention::program
