#pragma once

#include <array>

namespace flash_attention {

/// The two triples of `kernel<<<grid, block>>>(...)`, as far as plain kernels need them.
struct PlainLaunch {
  std::array<unsigned, 2> grid{1, 1};
  std::array<unsigned, 2> block{1, 1};
};

/// A `__global__` function of kernels/ that takes its own parameters and stands outside of all plans: the primer's.
class PlainKernel {
 public:
  virtual ~PlainKernel() = default;
  /// `parameters` are pointers to them, in order, as CUDA's own launch takes them.
  virtual void launch(const PlainLaunch& launch, void* const* parameters, void* stream) const = 0;
};

}  // namespace flash_attention
