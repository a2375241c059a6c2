#include "emulator/host/backend.h"
#include "emulator/host/module.h"
#include "emulator/host/seed.h"
#include "jit/kernel_key.h"
#include "jit/sources.h"
#include "support/settings.h"

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
  HostUnit host{to_string(key), jit::file_stem(key), {}, device.arch, true};
  host.text = jit::emit(key, jit::file_of_unit(unit, support::settings().kernel_dir));
  host.text += "extern \"C\" void kernel(void* const* parameters) { flash_attention::emulator::call_plain(" + entry +
               ", parameters); }\n";
  return std::make_unique<EmulatedPlainKernel>(load_module(host));
}

}  // namespace flash_attention::emulator
