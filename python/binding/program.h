#pragma once

#include <array>
#include <vector>

#include "call/call.h"

namespace flash_attention::python {

/// A program and the values that it captures, for one call: (text, tensors, numbers, gradients), as flash_attention.flex
/// makes it. The call points into it.
class ProgramArguments {
 public:
  ProgramArguments(nb::handle program, Call& call);
  ProgramArguments(const ProgramArguments&) = delete;

 private:
  static constexpr std::size_t most = 8;

  std::vector<Tensor> tensors_;
  std::array<const void*, most> pointers_{};
  std::array<float*, most> gradients_{};
  std::vector<double> numbers_;
};

}  // namespace flash_attention::python
