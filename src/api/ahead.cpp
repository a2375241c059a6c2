#include "api/ahead.h"

#include "api/prepared.h"
#include "flash_attention/error.h"
#include "jit/background/ahead.h"

namespace flash_attention::api {

void compile_ahead(const Problem& problem, Pass pass, const Options& options) {
  if (!device_traits(options.device).streams) return;
  try {
    const auto later = prepare(problem, pass, {.device = options.device});  // a kernel's name is that of one pass
    if (later->is_loaded()) return;
    std::vector<jit::KernelKey> keys;
    for (const Launch& launch : later->plan.launches) keys.push_back(jit::make_key(launch, later->device.arch));
    jit::compile_ahead(std::move(keys));
  } catch (const Error&) {
  }
}

}  // namespace flash_attention::api
