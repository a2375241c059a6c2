#pragma once

#include <cstdint>
#include <string>

#include "program/program.h"

namespace flash_attention::program {

struct SourceOptions {
  std::uint32_t gradients = 0;                   // bit n: the derivative by tensor n is wanted
  std::uint32_t empty = 0;                       // bit n: tensor n has no elements; reading it gives 0
  std::int64_t longest = std::int64_t{1} << 31;  // no index is larger
};

/// CUDA source of a program: a specialisation of tile::Program, which comes before the kernel.
std::string cuda_source(Program program, const SourceOptions& options);

}  // namespace flash_attention::program
