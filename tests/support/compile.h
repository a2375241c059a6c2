#pragma once

#include <string>
#include <vector>

#include "flash_attention/plan.h"
#include "jit/kernel_key.h"
#include "jit/report.h"

namespace flash_attention::testing {

/// What became of one kernel given to NVRTC in a process of its own, since NVRTC can crash on what it is given.
struct CompileOutcome {
  std::string name;
  std::string error{};  // empty: it compiled
  jit::CompileReport report{};
  double seconds = 0;  // of the compiler, on a core; 0 if it came from the cache
  std::string path{};  // the machine code in the cache
};

/// Two kernels at a time. Uses no disk cache, so every call compiles.
std::vector<CompileOutcome> compile_in_children(const std::vector<jit::KernelKey>& keys);

/// Why this machine cannot compile kernels; empty where it can. Tests skip with it.
std::string why_no_compiler();

/// Shared memory that one block of the architecture may use, in bytes.
int shared_limit(int arch);

/// Compiles each launch of the plans for the architecture and fails the current test on an error, a spill (of more bytes a
/// thread than are allowed), serialised or patched wgmma, or shared memory over the limit.
void expect_plans_compile(const std::vector<Plan>& plans, int arch, int allowed_spill_bytes = 0);
void expect_plan_compiles(const Plan& plan, int arch);

}  // namespace flash_attention::testing
