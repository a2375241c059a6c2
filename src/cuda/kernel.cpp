#include <span>

#include "cuda/backend.h"
#include "cuda/context.h"
#include "cuda/modules.h"
#include "cuda/status.h"
#include "cuda/tensor_map.h"
#include "flash_attention/error.h"
#include "jit/compile.h"
#include "launch/arguments.h"

namespace flash_attention::cuda {
namespace {

/// `follows`: another launch of the same call came before. Returns whether anything was started.
bool start(const Driver& cu, const Launch& launch, Function function, void* arguments, Stream stream, bool follows) {
  const auto [x, y, z] = launch.grid;
  if (x == 0 || y == 0 || z == 0) return false;  // nothing to do
  LaunchAttribute attributes[2];
  LaunchConfig config{.grid = {static_cast<unsigned>(x), static_cast<unsigned>(y), static_cast<unsigned>(z)},
                      .block = {static_cast<unsigned>(launch.block), 1, 1},
                      .shared_bytes = static_cast<unsigned>(launch.shared_bytes),
                      .stream = stream,
                      .attributes = attributes};
  if (launch.cluster > 1) {
    LaunchAttribute& cluster = attributes[config.num_attributes++];
    cluster.id = LaunchAttribute::cluster_dimension;
    cluster.value.cluster[0] = static_cast<unsigned>(launch.cluster);
    cluster.value.cluster[1] = cluster.value.cluster[2] = 1;
  }
  // The first launch must wait for the caller's earlier work, which does not tell when others may begin.
  if (launch.programmatic_launch && follows) {
    LaunchAttribute& early = attributes[config.num_attributes++];
    early.id = LaunchAttribute::programmatic_stream_serialization;
    early.value.allowed = 1;
  }
  void* parameters[] = {arguments};
  const Status status = cu.LaunchKernelEx(&config, function, parameters, nullptr);
  if (status != 0) [[unlikely]]
    fail(cu, status, "cuLaunchKernelEx of " + launch.unit);
  return true;
}

class CudaKernel final : public Kernel {
 public:
  CudaKernel(const Driver& cu, int device, std::vector<Function> functions)
      : cu_(cu), device_(device), functions_(std::move(functions)) {}

  void launch(const Problem& problem, const Plan& plan, const Buffers& buffers, const Options& options) const override {
    if (plan.launches.size() != functions_.size()) {
      throw Error(ErrorCode::internal, "the plan has " + std::to_string(plan.launches.size()) + " launches, the kernel " +
                                           std::to_string(functions_.size()));
    }
    const Stream stream = static_cast<Stream>(options.stream);
    const ContextScope scope(cu_, device_, stream);
    abi::AttentionArgs args = launch::make_arguments(problem, plan, buffers, options);
    for (const launch::TensorMapSpec& spec : launch::tensor_maps(plan, buffers, options.workspace))
      args.maps[spec.slot] = tensor_map(cu_, spec);
    const bool prepared = plan.mask.present && options.prepared_mask.data != nullptr;
    if (const std::size_t zeroed = prepared ? plan.mask.zeroed_bytes : plan.zeroed_bytes; zeroed != 0) {
      const auto workspace = reinterpret_cast<DevicePointer>(options.workspace);
      check(cu_, cu_.MemsetD8Async(workspace, 0, zeroed, stream), "cuMemsetD8Async");
    }
    bool follows = false;
    for (std::size_t i = prepared ? static_cast<std::size_t>(plan.mask.launches) : 0; i < functions_.size(); ++i)
      follows |= start(cu_, plan.launches[i], functions_[i], &args, stream, follows);
  }

 private:
  const Driver& cu_;
  int device_;
  std::vector<Function> functions_;  // one for each launch of the plan
};

class CudaLaunch final : public LaunchedKernel {
 public:
  CudaLaunch(const Driver& cu, int device, Function function) : cu_(cu), device_(device), function_(function) {}

  void launch(const Launch& launch, void* arguments, void* stream) const override {
    const ContextScope scope(cu_, device_, static_cast<Stream>(stream));
    start(cu_, launch, function_, arguments, static_cast<Stream>(stream), false);
  }

 private:
  const Driver& cu_;
  int device_;
  Function function_;
};

/// A function for each launch. While the stream is captured nothing can be loaded, so the call is refused.
std::vector<Function> load_functions(const Driver& cu, std::span<const Launch> launches, const DeviceInfo& device,
                                     Stream stream) {
  const int index = device.device.index;
  std::vector<Function> functions;
  std::vector<jit::KernelKey> missing;
  for (const Launch& launch : launches) {
    const jit::KernelKey key = jit::make_key(launch, device.arch);
    functions.push_back(find_function(key, launch, index));
    if (functions.back() == nullptr) missing.push_back(key);
  }
  if (missing.empty()) return functions;
  if (is_capturing(cu, stream)) {
    throw Error(ErrorCode::unavailable, "kernel " + to_string(missing.front()) +
                                            " is not loaded yet, and nothing can be compiled or loaded while the stream is "
                                            "captured; call prewarm (or the function itself once) before the capture");
  }
  const ContextScope scope(cu, index, stream);
  const CaptureUndisturbed undisturbed(cu);
  if (missing.size() > 1) jit::prewarm(missing).get();  // compiled in parallel, then loaded one after another
  for (std::size_t i = 0; i < functions.size(); ++i) {
    if (functions[i] == nullptr)
      functions[i] = load_function(cu, jit::make_key(launches[i], device.arch), launches[i], index);
  }
  return functions;
}

}  // namespace

std::unique_ptr<Kernel> load_kernel(const Plan& plan, const DeviceInfo& device, void* stream) {
  const Driver& cu = driver();
  return std::make_unique<CudaKernel>(cu, device.device.index,
                                      load_functions(cu, plan.launches, device, static_cast<Stream>(stream)));
}

std::unique_ptr<LaunchedKernel> load_launch(const Launch& launch, const DeviceInfo& device, void* stream) {
  const Driver& cu = driver();
  const Function function = load_functions(cu, {&launch, 1}, device, static_cast<Stream>(stream)).front();
  return std::make_unique<CudaLaunch>(cu, device.device.index, function);
}

}  // namespace flash_attention::cuda
