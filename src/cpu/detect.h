#pragma once

#include <string>

#include "flash_attention/device.h"

namespace flash_attention::cpu {

/// Whether this CPU and its operating system run an instruction set. For AMX the process requests the tile registers.
bool has_isa(CpuIsa isa);

/// The fastest instruction set here. On Intel's CPUs AVX512-BF16 multiplies at half the rate of AVX-512, so it is used
/// only on request.
CpuIsa best_isa();

/// The instruction set of FLASH_ATTENTION_CPU_ISA, even if this CPU lacks it; otherwise the best one.
CpuIsa chosen_isa();

/// Processors that this process may use: the affinity mask, cut by the quota of its control group.
int usable_processors();

/// The processors' worth of time that one control group allows, versions 1 and 2; infinite if there is no limit.
double quota_of(const std::string& group);

/// The lowest quota of a process's group and its ancestors. groups: /sys/fs/cgroup; membership: /proc/self/cgroup.
double quota_of_process(const std::string& groups, const std::string& membership);

}  // namespace flash_attention::cpu
