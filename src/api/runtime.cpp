#include "flash_attention/runtime.h"

#include "api/backends.h"
#include "api/checks/append_problem.h"
#include "api/guard.h"
#include "api/qualify.h"
#include "jit/cached.h"
#include "jit/compile.h"
#include "jit/diagnose.h"
#include "plan/append.h"
#include "plan/gpu_facts.h"

namespace flash_attention {

namespace {

std::vector<KernelReport> compile_all(const std::vector<jit::KernelKey>& keys) {
  jit::prewarm(keys).get();  // several at a time
  std::vector<KernelReport> reports;
  for (const jit::KernelKey& key : keys) {
    const auto kernel = jit::compiled(key);
    reports.push_back({.kernel = jit::to_string(key),
                       .registers = kernel->report.registers,
                       .spill_bytes = kernel->report.spill_store_bytes + kernel->report.spill_load_bytes,
                       .path = kernel->path.string(),
                       .compiled = kernel->compiled});
  }
  return reports;
}

}  // namespace

std::vector<KernelReport> compile(const Plan& plan, int arch) {
  return api::guarded([&] { return compile_all(jit::make_keys(plan, arch)); });
}

std::vector<KernelReport> compile(const AppendProblem& problem, int arch) {
  return api::guarded([&] { return compile_all({jit::make_key(plan::lay_out_append(api::normalise(problem)), arch)}); });
}

std::string describe_path(const DeviceInfo& gpu) {
  return api::guarded([&] {
    const Problem usual{.batch = 1,
                        .seq_q = 4096,
                        .seq_kv = 4096,
                        .heads_q = 16,
                        .heads_kv = 16,
                        .head_dim = 128,
                        .dtype = Dtype::bfloat16,
                        .causal = true};
    Problem decoding = usual;
    decoding.seq_q = 1;
    return make_plan(usual, Pass::forward, gpu).kernel + ", " + make_plan(usual, Pass::backward, gpu).kernel + ", " +
           make_plan(decoding, Pass::forward, gpu).kernel + " (bfloat16, head_dim 128); " +
           plan::describe_knowledge(gpu.arch);
  });
}

std::vector<Finding> diagnose() {
  return api::guarded([] {
    std::vector<Finding> findings;
    const auto add = [&](std::vector<Finding> more) {
      for (Finding& finding : more) findings.push_back(std::move(finding));
    };
    for (const Backend* backend : api::backends()) {
      if (backend->diagnose != nullptr) add(backend->diagnose());
    }
    add(jit::diagnose());
    findings.push_back({"invariant bits", true,
                        invariant_by_default()
                            ? "FLASH_ATTENTION_INVARIANT is on: calls that do not say otherwise have them"
                            : "of calls with `invariant`; of all with FLASH_ATTENTION_INVARIANT=1",
                        ""});
    for (const DeviceInfo& device : devices()) {
      if (!device_traits(device.device).gpu_kernels) continue;
      findings.push_back({"kernels on " + to_string(device.device), true, describe_path(device), ""});
      add(api::verdicts_on(device));
    }
    return findings;
  });
}

std::string cache_directory() {
  return api::guarded([] { return jit::product_cache().store().folder().string(); });
}

std::vector<CacheEntry> cache_entries() {
  return api::guarded([] { return jit::product_cache().store().entries(); });
}

std::int64_t clear_cache() {
  return api::guarded([] { return jit::product_cache().store().clear(); });
}

}  // namespace flash_attention
