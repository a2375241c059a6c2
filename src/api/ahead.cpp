#include "api/ahead.h"

#include "api/prepared.h"
#include "flash_attention/error.h"
#include "jit/background/ahead.h"

namespace flash_attention::api {

void compile_ahead(const Problem& problem, Pass pass, const Options& options) {
  if (!device_traits(options.device).streams) return;
  try {
    const auto later = prepare(problem, pass, {.device = options.device});  // the name of a kernel is for one pass only
    if (later->is_loaded()) return;
    jit::compile_ahead(jit::make_keys(later->plan, later->device.arch));
  } catch (const Error&) {
  }
}

}  // namespace flash_attention::api
