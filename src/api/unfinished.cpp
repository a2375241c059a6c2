// Weak stand-ins for rooms that have not landed yet; this file goes away with the last of them.
#include "cpu/backend.h"
#include "plan/arguments.h"
#include "plan/kernel_table.h"

#define WEAK __attribute__((weak))
namespace flash_attention {
namespace {
[[noreturn]] void missing(const char* what) { throw Error(ErrorCode::unavailable, std::string(what) + " is not built"); }
}  // namespace
namespace cpu {
WEAK DeviceInfo info() { return DeviceInfo{}; }
WEAK std::unique_ptr<Kernel> load_kernel(const Plan&, const DeviceInfo&) { missing("the CPU backend"); }
}  // namespace cpu
namespace plan {
WEAK std::span<const KernelEntry> cpu_kernels() { return {}; }
WEAK std::vector<TensorMapSpec> tensor_maps(const Problem&, const Plan&, const Buffers&) { return {}; }
}  // namespace plan
}  // namespace flash_attention
