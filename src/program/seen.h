#pragma once

#include <string>

#include "program/program.h"

namespace flash_attention::program {

/// CUDA source: what a tile of rows and keys can see of a mask program (seen), and before it what tensors of ints hold in
/// its keys alone (seen_keys), which many rows have in common.
std::string seen_source(const Program& program);

}  // namespace flash_attention::program
