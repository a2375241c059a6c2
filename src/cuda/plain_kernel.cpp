#include "cuda/backend.h"
#include "cuda/context.h"
#include "cuda/modules.h"
#include "cuda/status.h"

namespace flash_attention::cuda {
namespace {

class CudaPlainKernel final : public PlainKernel {
 public:
  CudaPlainKernel(int device, Function function, std::string name)
      : device_(device), function_(function), name_(std::move(name)) {}

  void launch(const PlainLaunch& launch, void* const* parameters, void* stream) const override {
    const Driver& cu = driver();
    const ContextScope scope(cu, device_, static_cast<Stream>(stream));
    const LaunchConfig config{.grid = {launch.grid[0], launch.grid[1], 1},
                              .block = {launch.block[0], launch.block[1], 1},
                              .stream = static_cast<Stream>(stream)};
    const Status status = cu.LaunchKernelEx(&config, function_, const_cast<void**>(parameters), nullptr);
    if (status != 0) fail(cu, status, "cuLaunchKernelEx of " + name_);
  }

 private:
  int device_;
  Function function_;
  std::string name_;
};

}  // namespace

std::unique_ptr<PlainKernel> load_plain_kernel(const std::string& unit, const std::string& entry,
                                               const DeviceInfo& device) {
  const Driver& cu = driver();
  const ContextScope scope(cu, device.device.index, nullptr);
  const CaptureUndisturbed undisturbed(cu);
  jit::KernelKey key;
  key.unit = unit;
  key.entry = entry;
  key.arch = device.arch;
  key.plain = true;
  return std::make_unique<CudaPlainKernel>(device.device.index, load_function(cu, key, {}, device.device.index), unit);
}

}  // namespace flash_attention::cuda
