#pragma once

#include "abi/config.h"
#include "flash_attention/plan.h"

namespace flash_attention::plan {

/// Adds the launches that sum the gradients of a program's tensors. `config` is that of the portable backward pass.
void add_program_gradients(const Problem& problem, const abi::BackwardConfig& config, Plan& plan);

/// What a problem's program does: needed for the choice of tiles.
struct ProgramTraits {
  bool score = false;         // it changes scores
  bool visible = false;       // it hides keys
  bool hides = false;         // a score may become -inf
  bool loads_scores = false;  // it reads memory for every score
  bool calls = false;         // it has functions that are not one instruction: sine and cosine
  int values = 0;             // values that a score needs
};
ProgramTraits traits_of_program(const Problem& problem);
inline ProgramTraits program_traits(const Problem& problem) {
  return problem.program.empty() ? ProgramTraits{} : traits_of_program(problem);
}

/// Adds the source of the problem's program to every launch of the plan.
void add_program_source(const Problem& problem, Plan& plan);

}  // namespace flash_attention::plan
