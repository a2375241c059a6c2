#include "program/sizes.h"

namespace flash_attention::program {

std::int64_t num_elements(const Problem& problem, const Program& program, int n) {
  const auto which = static_cast<std::size_t>(n);
  std::int64_t count = 1;
  for (int axis = 0; axis < program.tensors[which].rank; ++axis) {
    count *= problem.program_sizes[which][static_cast<std::size_t>(axis)];
  }
  return count;
}

GradientLayout gradient_layout(const Problem& problem, const Program& program) {
  GradientLayout layout;
  std::int64_t end = 256;
  for (int n = 0; n < max_tensors; ++n) {
    layout.offsets[n] = -1;
    if ((problem.program_gradients >> n & 1u) == 0) continue;
    layout.offsets[n] = end;
    end += (8 * num_elements(problem, program, n) + 255) / 256 * 256;
  }
  if (problem.program_gradients != 0) layout.bytes = end;
  return layout;
}

}  // namespace flash_attention::program
