#pragma once

#include <cstdint>
#include <string_view>

#include "support/oracle/case.h"

namespace flash_attention::testing {

// Programs for cases, and what each of them means, written out by hand: nothing here reads a program's text.

/// Sets the problem's text, the sizes of what it reads and the gradients it asks for. The case has its other sizes.
void describe_program(Case& c);

/// The tensors and numbers that it reads.
void draw_program(const Case& c, const Shape& shape, Inputs& in);

/// Whether the program lets query i see key j, by its mask or by a score above -inf.
bool program_shows(const Case& c, const Inputs& in, std::int64_t b, std::int64_t h, std::int64_t i, std::int64_t j);

/// The new score, its derivative by the old one, and that by the element of the first tensor that it reads. With
/// `in_float` tanh is a float, as a program's values are: near 1 its slope has few digits.
struct ProgramScore {
  double value = 0, slope = 1, by_element = 0;
  std::int64_t element = 0;
};
ProgramScore program_score(const Case& c, const Inputs& in, double score, std::int64_t h, std::int64_t i, std::int64_t j,
                           bool in_float);

}  // namespace flash_attention::testing
