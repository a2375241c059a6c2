#include "cuda/backend.h"
#include "cuda/context.h"
#include "cuda/modules.h"
#include "cuda/status.h"
#include "cuda/tensor_map.h"
#include "flash_attention/error.h"
#include "jit/compile.h"
#include "plan/arguments.h"

namespace flash_attention::cuda {
namespace {

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
    abi::AttentionArgs args = plan::make_arguments(problem, plan, buffers, options);
    for (const plan::TensorMapSpec& spec : plan::tensor_maps(problem, plan, buffers))
      args.maps[spec.slot] = tensor_map(cu_, spec);
    if (plan.zeroed_bytes != 0) {
      const auto workspace = reinterpret_cast<DevicePointer>(options.workspace);
      check(cu_, cu_.MemsetD8Async(workspace, 0, plan.zeroed_bytes, stream), "cuMemsetD8Async");
    }
    for (std::size_t i = 0; i < functions_.size(); ++i) start(plan.launches[i], functions_[i], args, stream);
  }

 private:
  void start(const Launch& launch, Function function, abi::AttentionArgs& args, Stream stream) const {
    const auto [x, y, z] = launch.grid;
    if (x == 0 || y == 0 || z == 0) return;  // nothing to do
    LaunchAttribute cluster{LaunchAttribute::cluster_dimension, 0, {{static_cast<unsigned>(launch.cluster), 1, 1}}};
    LaunchConfig config{.grid = {static_cast<unsigned>(x), static_cast<unsigned>(y), static_cast<unsigned>(z)},
                        .block = {static_cast<unsigned>(launch.block), 1, 1},
                        .shared_bytes = static_cast<unsigned>(launch.shared_bytes),
                        .stream = stream};
    if (launch.cluster > 1) {
      config.attributes = &cluster;
      config.num_attributes = 1;
    }
    void* parameters[] = {&args};
    const Status status = cu_.LaunchKernelEx(&config, function, parameters, nullptr);
    if (status != 0) [[unlikely]]
      fail(cu_, status, "cuLaunchKernelEx of " + launch.unit);
  }

  const Driver& cu_;
  int device_;
  std::vector<Function> functions_;  // one for each launch of the plan
};

}  // namespace

std::unique_ptr<Kernel> load_kernel(const Plan& plan, const DeviceInfo& device, void* stream) {
  const Driver& cu = driver();
  const int index = device.device.index;
  std::vector<Function> functions;
  std::vector<jit::KernelKey> missing;
  for (const Launch& launch : plan.launches) {
    const jit::KernelKey key = jit::make_key(launch, device.arch);
    functions.push_back(find_function(key, launch, index));
    if (functions.back() == nullptr) missing.push_back(key);
  }
  if (!missing.empty()) {
    const Stream handle = static_cast<Stream>(stream);
    if (is_capturing(cu, handle)) {
      throw Error(ErrorCode::unavailable,
                  "kernel " + to_string(missing.front()) +
                      " is not loaded yet, and nothing can be compiled or loaded while the stream is "
                      "captured; call prewarm (or the function itself once) before the capture");
    }
    const ContextScope scope(cu, index, handle);
    const CaptureUndisturbed undisturbed(cu);
    if (missing.size() > 1) jit::prewarm(missing).get();  // compiled side by side, then loaded one after the other
    for (std::size_t i = 0; i < functions.size(); ++i) {
      if (functions[i] != nullptr) continue;
      functions[i] = load_function(cu, jit::make_key(plan.launches[i], device.arch), plan.launches[i], index);
    }
  }
  return std::make_unique<CudaKernel>(cu, index, std::move(functions));
}

}  // namespace flash_attention::cuda
