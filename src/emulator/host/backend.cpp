#include "emulator/host/backend.h"

#include <algorithm>
#include <atomic>
#include <cstring>

#include "emulator/host/module.h"
#include "emulator/host/seed.h"
#include "emulator/instructions/tensor_map.h"
#include "flash_attention/error.h"
#include "launch/arguments.h"
#include "plan/gpu_facts.h"
#include "support/settings.h"

namespace flash_attention::emulator {
namespace {

constexpr int default_arch = 90;
constexpr std::uint64_t unset = ~std::uint64_t{0};
std::atomic<std::uint64_t> chosen_seed = unset;
std::atomic<int> chosen_num_sms = 0;

LaunchShape shape_of(const Launch& launch) {
  const auto [x, y, z] = launch.grid;
  return {.grid = {static_cast<unsigned>(x), static_cast<unsigned>(y), static_cast<unsigned>(z)},
          .block = launch.block,
          .cluster = launch.cluster,
          .shared_bytes = launch.shared_bytes,
          .blocks_per_sm = launch.min_blocks_per_sm};
}

class EmulatedKernel final : public Kernel {
 public:
  explicit EmulatedKernel(std::vector<std::shared_ptr<const Module>> modules) : modules_(std::move(modules)) {}

  void launch(const Problem& problem, const Plan& plan, const Buffers& buffers, const Options& options) const override {
    abi::AttentionArgs args = launch::make_arguments(problem, plan, buffers, options);
    for (const launch::TensorMapSpec& spec : launch::tensor_maps(plan, buffers, options.workspace))
      args.maps[spec.slot] = encode(spec);
    const bool prepared = plan.mask.present && options.prepared_mask.data != nullptr;
    if (const std::size_t zeroed = prepared ? plan.mask.zeroed_bytes : plan.zeroed_bytes; zeroed != 0)
      std::memset(options.workspace, 0, zeroed);
    const std::size_t first = prepared ? static_cast<std::size_t>(plan.mask.launches) : 0;
    for (std::size_t i = first; i < modules_.size(); ++i) {
      LaunchShape shape = shape_of(plan.launches[i]);
      shape.programmatic_launch = plan.launches[i].programmatic_launch && i > first;
      shape.workspace = options.workspace, shape.workspace_bytes = plan.workspace_bytes;
      run_grid(*modules_[i], shape, &args, {.seed = seed(), .unit = plan.launches[i].unit});
    }
  }

 private:
  std::vector<std::shared_ptr<const Module>> modules_;  // one for each launch of the plan
};

class EmulatedLaunch final : public LaunchedKernel {
 public:
  explicit EmulatedLaunch(std::shared_ptr<const Module> module) : module_(std::move(module)) {}

  void launch(const Launch& launch, void* arguments, void*) const override {
    run_grid(*module_, shape_of(launch), arguments, {.seed = seed()});
  }

 private:
  std::shared_ptr<const Module> module_;
};

std::shared_ptr<const Module> module_of(const Launch& launch, int arch) {
  return load_module(jit::unit_of(jit::make_key(launch, arch)));
}

}  // namespace

std::uint64_t seed() {
  const std::uint64_t chosen = chosen_seed;
  return chosen != unset ? chosen : support::settings().emulator_seed;
}

void set_seed(std::uint64_t seed) { chosen_seed = seed; }

void set_num_sms(int num_sms) { chosen_num_sms = num_sms; }

DeviceInfo info(int arch) {
  if (arch == 0) arch = default_arch;
  if (!plan::is_emulated(arch)) {
    throw Error(ErrorCode::unavailable, "the emulator emulates " + plan::emulated_archs() + ", not sm_" + std::to_string(arch));
  }
  DeviceInfo info = typical_gpu(arch);
  info.device = {DeviceKind::emulator, 0, arch};
  info.name = "emulated " + info.name;
  if (const int chosen = chosen_num_sms; chosen > 0) info.num_sms = chosen;
  return info;
}

std::unique_ptr<Kernel> load_kernel(const Plan& plan, const DeviceInfo& device) {
  std::vector<std::shared_ptr<const Module>> modules;
  for (const Launch& launch : plan.launches) modules.push_back(module_of(launch, device.arch));
  return std::make_unique<EmulatedKernel>(std::move(modules));
}

std::unique_ptr<LaunchedKernel> load_launch(const Launch& launch, const DeviceInfo& device) {
  return std::make_unique<EmulatedLaunch>(module_of(launch, device.arch));
}

constinit const Backend backend{
    .kind = DeviceKind::emulator,
    .name = "emulator",
    .traits = {.host_memory = true, .gpu_kernels = true, .emulated = true},
    .vector_bytes = 16,
    .info =
        [](const Device& device) {
          if (const int arch = device.emulated_arch; arch == 0 || plan::is_emulated(arch)) return info(arch);
          throw Error(ErrorCode::invalid_argument, "device.emulated_arch: got " + std::to_string(device.emulated_arch) +
                                                       "; allowed are those of " + plan::emulated_archs());
        },
    .describe =
        [](const Device& device) {
          return "emulator:sm_" + std::to_string(device.emulated_arch == 0 ? default_arch : device.emulated_arch);
        },
    .num_sms = []() -> int { return chosen_num_sms; },
    .load = [](const Problem&, const Plan& plan, const DeviceInfo& device, void*) { return load_kernel(plan, device); },
    .load_launch = [](const Launch& launch, const DeviceInfo& device, void*) { return load_launch(launch, device); },
    .load_plain = load_plain_kernel,
};

}  // namespace flash_attention::emulator
