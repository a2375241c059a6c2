#include "flash_attention/attention.h"

#include <memory>
#include <optional>

#include "api/checks/program_options.h"
#include "api/checks/validate.h"
#include "api/guard.h"
#include "api/masks/prepared_mask.h"
#include "api/prepared.h"
#include "api/program.h"
#include "api/watchdog.h"
#include "flash_attention/error.h"
#include "flash_attention/planned_call.h"
#include "flash_attention/runtime.h"
#include "jit/background/ahead.h"
#include "plan/masks.h"
#include "support/settings.h"

namespace flash_attention {
namespace {

/// Begins to compile the kernels of a later call, and returns. Does nothing if that call compiles nothing, or would be
/// refused: the call itself then says why.
void compile_ahead(const Problem& problem, Pass pass, const Options& options) {
  if (!device_traits(options.device).streams) return;
  try {
    const auto later = api::prepare(problem, pass, {.device = options.device});  // a kernel's name is for one pass only
    if (later->is_loaded()) return;
    jit::compile_ahead(jit::make_keys(later->plan, later->device.arch));
  } catch (const Error&) {
  }
}

void run(const Problem& problem, const api::Prepared& prepared, const Buffers& given, const Options& options) {
  std::optional<Buffers> with_slopes;
  if (prepared.slopes >= 0) [[unlikely]]
    with_slopes = api::with_slopes(prepared.problem, given, prepared.slopes);
  const Buffers& buffers = with_slopes ? *with_slopes : given;
  api::validate(prepared.problem, prepared.plan, buffers, options);
  if (options.prepared_mask.data != nullptr) api::check_prepared_mask(prepared, buffers, options.prepared_mask);
  // Without a batch nothing is read, but sums over the batch are written: dsink, and dbias if it is broadcast.
  const bool sums = buffers.dsink != nullptr || buffers.dbias != nullptr || prepared.problem.program_gradients != 0;
  if (prepared.problem.batch == 0 && !sums) return;
  if (options.backward_follows && !prepared.is_loaded()) [[unlikely]]
    compile_ahead(problem, Pass::backward, options);
  prepared.kernel(options.stream).launch(prepared.problem, prepared.plan, buffers, options);
  if (support::settings().check && prepared.plan.shared_rows == 0) [[unlikely]]  // a part of a pass has no result yet
    api::watch(prepared, buffers, options);
}

void run(const Problem& problem, Pass pass, const Buffers& buffers, const Options& options) {
  api::guarded([&] { run(problem, *api::prepare_to_run(problem, pass, options), buffers, options); });
}

}  // namespace

void forward(const Problem& problem, const Buffers& buffers, const Options& options) {
  run(problem, Pass::forward, buffers, options);
}

void backward(const Problem& problem, const Buffers& buffers, const Options& options) {
  run(problem, Pass::backward, buffers, options);
}

void tangent(const Problem& problem, const Buffers& buffers, const Options& options) {
  run(problem, Pass::tangent, buffers, options);
}

void second(const Problem& problem, const Buffers& buffers, const Options& options) {
  run(problem, Pass::second, buffers, options);
}

void standard_forward(const Problem& problem, const Buffers& buffers, const Options& options) {
  run(problem, Pass::standard_forward, buffers, options);
}

void standard_backward(const Problem& problem, const Buffers& buffers, const Options& options) {
  run(problem, Pass::standard_backward, buffers, options);
}

std::size_t workspace_bytes(const Problem& problem, Pass pass, const Options& options) {
  return api::guarded(
      [&] { return plan::needed_workspace(api::prepare(problem, pass, options)->plan, options.prepared_mask); });
}

PlannedCall::PlannedCall(const Problem& problem, Pass pass, const Options& options)
    : problem_(problem), prepared_(api::guarded([&] { return api::prepare(problem, pass, options); })) {}

std::size_t PlannedCall::workspace_bytes(const PreparedMask& mask) const {
  return plan::needed_workspace(prepared_->plan, mask);
}

void PlannedCall::run(const Buffers& buffers, const Options& options) const {
  api::guarded([&] { flash_attention::run(problem_, *prepared_, buffers, options); });
}

std::string explain(const Problem& problem, Pass pass, const Options& options) {
  return api::guarded([&] {
    const std::shared_ptr<const api::Prepared> prepared = api::prepare(problem, pass, options);
    return std::string(to_string(pass)) + " of " + to_string(prepared->problem) + "\n" + to_string(prepared->plan) +
           (prepared->plan.unproven ? "unproven   never run on such a GPU; a self-test at its first use decides\n" : "") +
           api::described_program(prepared->problem);
  });
}

void prewarm(const Problem& problem, Pass pass, const Options& options) {
  api::guarded([&] { api::prepare(problem, pass, options)->kernel(options.stream); });
}

std::future<void> prewarm_in_background(const Problem& problem, Pass pass, const Options& options) {
  return api::guarded([&] {
    return std::async(std::launch::async, [=, kernel = std::string(options.kernel)] {
      Options own = options;
      own.kernel = kernel;  // the caller's text may no longer exist
      prewarm(problem, pass, own);
    });
  });
}

}  // namespace flash_attention
