#include "cpu/detect.h"

#include <sched.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <cmath>
#include <fstream>
#include <string>

#include "support/settings.h"

#if defined(__x86_64__) && !defined(FLASH_ATTENTION_GENERIC_CPU)  // cmake/cpu_isa.cmake
#include <cpuid.h>
#endif

namespace flash_attention::cpu {
namespace {

#if defined(__x86_64__) && !defined(FLASH_ATTENTION_GENERIC_CPU)

/// The state components that the operating system saves: bits 17 and 18 are the tiles' configuration and data.
unsigned long long saved_state() {
  unsigned low = 0, high = 0;
  __asm__ volatile("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
  return (static_cast<unsigned long long>(high) << 32) | low;
}

/// Tests CPUID leaf 7 (AMX-TILE, AMX-BF16 and AVX512-BF16), XCR0, and the permission that Linux gives a process on
/// request. Leaf 0x1D, the palette, is not read: some hypervisors hide it, and palette 1 is architectural.
bool has_amx() {
  unsigned eax = 0, ebx = 0, ecx = 0, edx = 0;
  if (__get_cpuid_count(1, 0, &eax, &ebx, &ecx, &edx) == 0 || (ecx & (1u << 27)) == 0) return false;  // OSXSAVE
  if (__get_cpuid_count(7, 0, &eax, &ebx, &ecx, &edx) == 0) return false;
  const bool tile = (edx & (1u << 24)) != 0, tile_bf16 = (edx & (1u << 22)) != 0;
  if (!tile || !tile_bf16) return false;
  constexpr unsigned long long tiles = 3ull << 17;
  if ((saved_state() & tiles) != tiles) return false;
  constexpr long arch_req_xcomp_perm = 0x1023, tile_data = 18;
  return syscall(SYS_arch_prctl, arch_req_xcomp_perm, tile_data) == 0;
}

bool has_avx512() {
  return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq") &&
         __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512cd");
}

bool has_avx2() {
  unsigned eax = 0, ebx = 0, ecx = 0, edx = 0;
  const bool f16c = __get_cpuid(1, &eax, &ebx, &ecx, &edx) != 0 && (ecx & (1u << 29)) != 0;
  return f16c && __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("bmi2");
}

#endif

}  // namespace

bool has_isa(CpuIsa isa) {
  switch (isa) {
    case CpuIsa::generic:
      return true;
#if defined(__x86_64__) && !defined(FLASH_ATTENTION_GENERIC_CPU)
    case CpuIsa::avx2:
      return has_avx2();
    case CpuIsa::avx512:
      return has_avx512();
    case CpuIsa::avx512_bf16:
      return has_avx512() && __builtin_cpu_supports("avx512bf16") && __builtin_cpu_supports("avx512vbmi");
    case CpuIsa::amx: {
      static const bool amx = has_isa(CpuIsa::avx512_bf16) && has_amx();
      return amx;
    }
#elif defined(__aarch64__)
    case CpuIsa::neon:
      return true;
#endif
    default:
      return false;
  }
}

CpuIsa best_isa() {
  if (has_isa(CpuIsa::amx)) return CpuIsa::amx;
#if defined(__x86_64__) && !defined(FLASH_ATTENTION_GENERIC_CPU)
  if (__builtin_cpu_is("amd") && has_isa(CpuIsa::avx512_bf16)) return CpuIsa::avx512_bf16;
#endif
  for (CpuIsa isa : {CpuIsa::avx512, CpuIsa::avx2, CpuIsa::neon}) {
    if (has_isa(isa)) return isa;
  }
  return CpuIsa::generic;
}

CpuIsa chosen_isa() { return support::settings().cpu_isa.value_or(best_isa()); }

namespace {

/// The quota in the files of one folder.
double quota_in(const std::string& folder) {
  std::string limit;
  double period = 0, microseconds = 0;
  if (std::ifstream(folder + "/cpu.max") >> limit >> period && limit != "max" && period > 0) {
    return std::stod(limit) / period;
  }
  if (std::ifstream(folder + "/cpu.cfs_quota_us") >> microseconds &&
      std::ifstream(folder + "/cpu.cfs_period_us") >> period && microseconds > 0 && period > 0) {
    return microseconds / period;
  }
  return INFINITY;
}

}  // namespace

double quota_of(const std::string& group) {
  const double version_2 = quota_in(group);
  return std::isfinite(version_2) ? version_2 : quota_in(group + "/cpu");
}

double quota_of_process(const std::string& groups, const std::string& membership) {
  double least = quota_of(groups);
  std::ifstream file(membership);
  for (std::string line; std::getline(file, line);) {  // number:controllers:path; version 2 names no controllers
    const std::size_t first = line.find(':'), second = line.find(':', first + 1);
    if (first == std::string::npos || second == std::string::npos) continue;
    const std::string controllers = line.substr(first + 1, second - first - 1);
    if (!controllers.empty() && ("," + controllers + ",").find(",cpu,") == std::string::npos) continue;
    const std::string root = controllers.empty() ? groups : groups + "/cpu";
    for (std::string path = line.substr(second + 1); path.size() > 1; path.resize(path.rfind('/'))) {
      least = std::min(least, quota_in(root + path));
    }
  }
  return least;
}

int usable_processors() {
  cpu_set_t set;
  CPU_ZERO(&set);
  const int allowed =
      sched_getaffinity(0, sizeof set, &set) == 0 ? CPU_COUNT(&set) : static_cast<int>(sysconf(_SC_NPROCESSORS_ONLN));
  const double quota = std::ceil(quota_of_process("/sys/fs/cgroup", "/proc/self/cgroup"));
  return std::max(1, static_cast<int>(std::min<double>(allowed, quota)));
}

}  // namespace flash_attention::cpu
