#pragma once

#include <cstdint>
#include <vector>

#include "flash_attention/attention.h"

namespace flash_attention::api {

/// What a prepared mask is like, but for what the buffers hold.
struct MaskForm {
  std::uint64_t hash = 0;             // of tiles, sizes and kinds of masks; 0: nothing is prepared
  std::vector<int> tensors, scalars;  // of the program, that its mask reads
};
MaskForm form_of(const Problem& problem, const Plan& plan);

/// The form with where the masks are, and with the numbers that a mask program is given; 0: nothing is prepared.
std::uint64_t stamp_of(const MaskForm& form, const Buffers& buffers);

}  // namespace flash_attention::api
