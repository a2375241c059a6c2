#pragma once

#include <cstdint>
#include <vector>

#include "flash_attention/attention.h"

namespace flash_attention::api {

/// The form of a prepared mask: everything but the contents of the buffers.
struct MaskForm {
  std::uint64_t hash = 0;             // of tiles, sizes and kinds of masks; 0: nothing is prepared
  std::vector<int> tensors, scalars;  // of the program: those that its mask reads
};
MaskForm form_of(const Problem& problem, const Plan& plan);

/// A hash of the form, of the pointers of the masks, and of the scalars of a mask program. 0: nothing is prepared.
std::uint64_t stamp_of(const MaskForm& form, const Buffers& buffers);

}  // namespace flash_attention::api
