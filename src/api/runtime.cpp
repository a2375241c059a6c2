#include "flash_attention/runtime.h"

#include "cpu/backend.h"
#include "cuda/backend.h"
#include "jit/diagnose.h"

namespace flash_attention {

std::vector<Finding> diagnose() {
  const DeviceInfo cpu = cpu::info();
  std::vector<Finding> findings{{.subject = "CPU",
                                 .ok = true,
                                 .detail = cpu.name + ", " + std::string(to_string(cpu.isa)) + ", " + std::to_string(cpu.threads) +
                                           (cpu.threads == 1 ? " thread" : " threads"),
                                 .advice = ""}};
  for (auto part : {cuda::diagnose, jit::diagnose}) {
    for (Finding& finding : part()) findings.push_back(std::move(finding));
  }
  return findings;
}

}  // namespace flash_attention
