"""Mistakes of meaning in src/cuda: whose context, which GPU, what is loaded once, what a capture forbids."""

from .plant import Plant

KERNEL = "cuda_test KernelTest.*"
DRIVER = "cuda_test DriverTest.*"

PLANTS = (
    Plant(
        "a kernel of a toolkit that is too new for the driver is an error",
        "src/cuda/modules.cpp",
        "if (!kernel->ahead_of_time) fail(",
        "fail(",
        "cuda_test OtherToolkitTest.*",
    ),
    Plant(
        "a failed driver is remembered",
        "src/cuda/driver.cpp",
        '  const auto* opened = new Driver(open_driver(chosen.empty() ? "libcuda.so.1" : chosen));',
        "  static int tries = 0;\n"
        '  if (tries++ > 0) unavailable("cuInit failed before");\n'
        '  const auto* opened = new Driver(open_driver(chosen.empty() ? "libcuda.so.1" : chosen));',
        "cuda_test DriverRetryTest.*",
    ),
    Plant(
        "loading disturbs the capture of another thread",
        "src/cuda/kernel.cpp",
        "  const CaptureUndisturbed undisturbed(cu);\n",
        "",
        KERNEL,
    ),
    Plant(
        "the mode of captures does not come back",
        "src/cuda/context.cpp",
        "CaptureUndisturbed::~CaptureUndisturbed() { cu_.ThreadExchangeStreamCaptureMode(&mode_); }",
        "CaptureUndisturbed::~CaptureUndisturbed() {}",
        KERNEL,
    ),
    Plant(
        "allocating disturbs the capture of another thread",
        "src/cuda/memory.cpp",
        "  const CaptureUndisturbed undisturbed(cu);\n  const Status status = cu.MemAlloc",
        "  const Status status = cu.MemAlloc",
        KERNEL,
    ),
    Plant(
        "a stream of another GPU is taken",
        "src/cuda/context.cpp",
        "    if (owner != device) {\n",
        "    if (owner < device) {\n",
        KERNEL,
    ),
    Plant(
        "a kernel is loaded although the stream is captured",
        "src/cuda/kernel.cpp",
        "  if (is_capturing(cu, stream)) {\n",
        "  if (false && is_capturing(cu, stream)) {\n",
        KERNEL,
    ),
    Plant(
        "the caller's context of another GPU is used",
        "src/cuda/context.cpp",
        "    if (current_device == device) return;\n",
        "    return;\n",
        KERNEL,
    ),
    Plant(
        "the context does not come back",
        "src/cuda/context.cpp",
        "  if (pushed_) cu_.CtxPopCurrent(&ignored);\n",
        "  (void)ignored;\n",
        KERNEL,
    ),
    Plant(
        "more shared memory is not asked for",
        "src/cuda/modules.cpp",
        "return allowed != module.shared_bytes.end() && allowed->second >= launch.shared_bytes;",
        "(void)launch;\n  return allowed != module.shared_bytes.end();",
        KERNEL,
    ),
    Plant(
        "clusters are launched without their attribute",
        "src/cuda/kernel.cpp",
        "  if (launch.cluster > 1) {\n",
        "  if (launch.cluster > 2) {\n",
        KERNEL,
    ),
    Plant(
        "the workspace is not zeroed",
        "src/cuda/kernel.cpp",
        ": plan.zeroed_bytes; zeroed != 0) {\n",
        ": plan.zeroed_bytes; zeroed > 256) {\n",
        KERNEL,
    ),
    Plant(
        "the counter of row tiles is not zeroed where a mask was prepared",
        "src/cuda/kernel.cpp",
        "zeroed = prepared ? plan.mask.zeroed_bytes : plan.zeroed_bytes;",
        "zeroed = plan.zeroed_bytes;",
        KERNEL,
    ),
    Plant(
        "a prepared mask is prepared again",
        "src/cuda/kernel.cpp",
        "std::size_t i = prepared ? static_cast<std::size_t>(plan.mask.launches) : 0;",
        "std::size_t i = 0;",
        KERNEL,
    ),
    Plant(
        "tensor maps are told apart by their address alone",
        "src/cuda/tensor_map.cpp",
        "  if (!(place.spec == spec)) place",
        "  if (place.spec.data != spec.data) place",
        DRIVER,
    ),
    Plant(
        "bfloat16 is mapped as float16",
        "src/cuda/tensor_map.cpp",
        "    case Dtype::bfloat16:\n      return 9;\n",
        "    case Dtype::bfloat16:\n      return 6;\n",
        DRIVER,
    ),
    Plant(
        "a call that is captured is checked",
        "src/api/watchdog.cpp",
        "  if (backend.is_captured != nullptr && backend.is_captured(options.stream)) return;\n",
        "",
        "cuda_test CudaWatchdog.*",
    ),
)
