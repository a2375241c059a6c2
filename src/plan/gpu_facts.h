#pragma once

#include <span>
#include <string>
#include <string_view>

#include "flash_attention/device.h"

namespace flash_attention::plan {

/// How well the library is tested on an architecture.
enum class Knowledge {
  measured,  // run, checked and timed on such a GPU
  emulated,  // every kernel runs in the emulator for it, and compiles
  compiled,  // every kernel that is chosen for it compiles; none has run
};

/// A typical GPU of an architecture, for plans and compilations without such a GPU.
struct GpuFacts {
  int arch;
  std::string_view name;
  int num_sms;
  int shared_bytes;  // that one block may use
  int l2_megabytes;
  Knowledge knowledge;
};

/// From the oldest to the newest.
std::span<const GpuFacts> gpu_facts();

/// The facts of that architecture; null if it is not in the table.
const GpuFacts* find_gpu_facts(int arch);

/// Whether the emulator emulates the architecture, and all that it emulates: "sm_80, sm_90".
bool is_emulated(int arch);
std::string emulated_archs();

/// How well the library is tested on that architecture, in words.
std::string describe_knowledge(int arch);

}  // namespace flash_attention::plan
