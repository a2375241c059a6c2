#pragma once

#include <string>

#include "flash_attention/attention.h"

namespace flash_attention::api {

/// Refuses text that is not a program, sizes that do not fit the captured tensors, and indices that are out of range
/// whatever the tensors contain. The problem is otherwise normalised. Forward drops everything that belongs to
/// gradients.
void check_program(Problem& problem, Pass pass);

/// Refuses pointers that do not fit the program.
void check_program_pointers(const Problem& problem, Pass pass, const Buffers& buffers);

/// The program as text for people, indented; nothing if there is none.
std::string described_program(const Problem& problem);

}  // namespace flash_attention::api
