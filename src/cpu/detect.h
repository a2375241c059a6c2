#pragma once

#include <string>

#include "flash_attention/device.h"

namespace flash_attention::cpu {

/// Whether this CPU and its operating system run an instruction set. For AMX the process asks for the tile registers.
bool has_isa(CpuIsa isa);

/// The fastest one here. On Intel's CPUs AVX512-BF16 multiplies at half the rate of AVX-512, so it is taken only if asked
/// for.
CpuIsa best_isa();

/// That of FLASH_ATTENTION_CPU_ISA, which the CPU may lack, else the best one.
CpuIsa chosen_isa();

/// Processors that this process may use: the affinity mask, cut by the quota of its control group.
int usable_processors();

/// Processors' worth of time that one control group allows, versions 2 and 1; infinite where it sets no limit.
double quota_of(const std::string& group);

/// The least of a process's group and those above it. groups: /sys/fs/cgroup; membership: /proc/self/cgroup.
double quota_of_process(const std::string& groups, const std::string& membership);

}  // namespace flash_attention::cpu
