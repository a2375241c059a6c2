#include "plan/gpu_facts.h"

#include <algorithm>
#include <array>

#include "flash_attention/error.h"

namespace flash_attention::plan {
namespace {

// Shared memory: the CUDA programming guide's table of compute capabilities. The tests compile for each row.
constexpr std::array<GpuFacts, 9> table{{
    {75, "T4", 40, 64 << 10, 4, Knowledge::compiled},
    {80, "A100", 108, 163 << 10, 40, Knowledge::emulated},
    {86, "A10", 72, 99 << 10, 6, Knowledge::compiled},
    {89, "L40S", 142, 99 << 10, 96, Knowledge::emulated},
    {90, "H200", 132, 227 << 10, 50, Knowledge::measured},
    {100, "B200", 148, 227 << 10, 126, Knowledge::emulated},
    {103, "B300", 148, 227 << 10, 126, Knowledge::compiled},
    {120, "RTX 5090", 170, 99 << 10, 96, Knowledge::emulated},
    {121, "GB10", 48, 99 << 10, 24, Knowledge::compiled},
}};

std::string words(Knowledge knowledge) {
  switch (knowledge) {
    case Knowledge::measured:
      return "run, checked and timed on such a GPU";
    case Knowledge::emulated:
      return "checked in the emulator and by compiling; never run on such a GPU";
    case Knowledge::compiled:
      return "checked by compiling alone; never run on such a GPU";
  }
  return "";
}

}  // namespace

std::span<const GpuFacts> gpu_facts() { return table; }

const GpuFacts* find_gpu_facts(int arch) {
  const auto* found = std::ranges::find(table, arch, &GpuFacts::arch);
  return found == table.end() ? nullptr : found;
}

bool is_emulated(int arch) {
  const GpuFacts* facts = find_gpu_facts(arch);
  return facts != nullptr && facts->knowledge != Knowledge::compiled;
}

std::string emulated_archs() {
  std::string list;
  for (const GpuFacts& facts : table) {
    if (is_emulated(facts.arch)) list += (list.empty() ? "sm_" : ", sm_") + std::to_string(facts.arch);
  }
  return list;
}

std::string describe_knowledge(int arch) {
  const GpuFacts* facts = find_gpu_facts(arch);
  return facts != nullptr ? words(facts->knowledge) : "an architecture that no test covers";
}

}  // namespace flash_attention::plan

namespace flash_attention {

DeviceInfo typical_gpu(int arch) {
  const plan::GpuFacts* facts = plan::find_gpu_facts(arch);
  if (facts == nullptr) {
    std::string known;
    for (const plan::GpuFacts& row : plan::gpu_facts())
      known += (known.empty() ? "sm_" : ", sm_") + std::to_string(row.arch);
    throw Error(ErrorCode::invalid_argument, "arch: got sm_" + std::to_string(arch) + ", allowed: " + known);
  }
  DeviceInfo info;
  info.device = {.kind = DeviceKind::cuda};
  info.name = facts->name;
  info.arch = arch;
  info.num_sms = facts->num_sms;
  info.shared_bytes = facts->shared_bytes;
  info.l2_bytes = std::int64_t{facts->l2_megabytes} << 20;
  return info;
}

}  // namespace flash_attention
