#pragma once

#include <cstdint>
#include <string>

#include "flash_attention/export.h"

namespace flash_attention::emulator {

/// The work of the kernels, counted exactly if a ptx:: wrapper was used. Plain C++ accesses are not counted.
struct Counters {
  std::uint64_t blocks = 0;
  std::uint64_t threads = 0;
  std::uint64_t shared_requests = 0;          ///< warp instructions: ld.shared, st.shared, ldmatrix, stmatrix
  std::uint64_t shared_wavefronts = 0;        ///< rounds over the 32 banks that they needed
  std::uint64_t shared_wavefronts_ideal = 0;  ///< passes without any bank conflict
  std::uint64_t global_requests = 0;          ///< warp instructions: ld.global, st.global, cp.async
  std::uint64_t global_sectors = 0;           ///< 32-byte sectors that they touched
  std::uint64_t bulk_bytes = 0;               ///< moved by TMA and bulk copies, either way
  std::uint64_t mma_flops = 0;                ///< mma.sync and wmma
  std::uint64_t wgmma_flops = 0;
  std::uint64_t tcgen05_flops = 0;
  std::uint64_t fma_flops = 0;       ///< ptx::fma, two each
  std::uint64_t barrier_waits = 0;   ///< warps that arrived at __syncthreads or bar.sync
  std::uint64_t mbarrier_waits = 0;  ///< waits for a phase, of single threads

  Counters& operator+=(const Counters& other);
};

/// The sum over all launches of this process since the last reset.
FLASH_ATTENTION_API Counters counters();
FLASH_ATTENTION_API void reset_counters();

/// Grouping single accesses into warp instructions costs time, so it is off by default. Returns the earlier setting.
FLASH_ATTENTION_API bool count_accesses(bool on);

/// A table for people.
FLASH_ATTENTION_API std::string to_string(const Counters& counters);

}  // namespace flash_attention::emulator
