#include "emulator/host/backend.h"
#include "emulator/host/module.h"
#include "emulator/host/seed.h"

namespace flash_attention::emulator {
namespace {

class EmulatedPlainKernel final : public PlainKernel {
 public:
  explicit EmulatedPlainKernel(std::shared_ptr<const Module> module) : module_(std::move(module)) {}

  void launch(const PlainLaunch& launch, void* const* parameters, void*) const override {
    LaunchShape shape;
    shape.grid = {launch.grid[0], launch.grid[1], 1};
    shape.block = static_cast<int>(launch.block[0] * launch.block[1]);
    shape.block_height = static_cast<int>(launch.block[1]);
    run_grid(*module_, shape, &parameters, {.seed = seed()});
  }

 private:
  std::shared_ptr<const Module> module_;
};

}  // namespace

std::unique_ptr<PlainKernel> load_plain_kernel(const std::string& unit, const std::string& entry,
                                               const DeviceInfo& device) {
  jit::KernelKey key;
  key.unit = unit;
  key.entry = entry;
  key.arch = device.arch;
  key.plain = true;
  jit::Unit host = jit::unit_of(key);
  host.counts_plain_accesses = true;
  host.text += "extern \"C\" void kernel(void* const* parameters) { flash_attention::emulator::call_plain(" + entry +
               ", parameters); }\n";
  return std::make_unique<EmulatedPlainKernel>(load_module(host));
}

}  // namespace flash_attention::emulator
