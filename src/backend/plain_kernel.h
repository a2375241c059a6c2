#pragma once

#include <array>

namespace flash_attention {

/// The two triples of `kernel<<<grid, block>>>(...)`, in the form that plain kernels need.
struct PlainLaunch {
  std::array<unsigned, 2> grid{1, 1};
  std::array<unsigned, 2> block{1, 1};
};

/// A `__global__` function of kernels/ with its own parameters, outside of all plans: for the primer.
class PlainKernel {
 public:
  virtual ~PlainKernel() = default;
  /// `parameters` are pointers to the parameters, in order, as in CUDA's own launch.
  virtual void launch(const PlainLaunch& launch, void* const* parameters, void* stream) const = 0;
};

}  // namespace flash_attention
