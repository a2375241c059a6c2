// Weak stand-ins for rooms that have not landed yet; this file goes away with the last of them.
#include "plan/arguments.h"

#define WEAK __attribute__((weak))
namespace flash_attention::plan {
WEAK std::vector<TensorMapSpec> tensor_maps(const Problem&, const Plan&, const Buffers&) { return {}; }
}  // namespace flash_attention::plan
