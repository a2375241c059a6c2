#pragma once

#include <array>
#include <cstdint>
#include <initializer_list>
#include <optional>
#include <string>

#include "flash_attention/device.h"
#include "flash_attention/plan.h"
#include "flash_attention/problem.h"
#include "plan/kernel_table.h"

// Shared by the families of kernels with mma.sync: sm80, tf32 and fp32. They are the same kernels with elements of 16
// and 32 bits, and with products of floats on CUDA cores.

namespace flash_attention::plan {

constexpr int mma_small_bytes = 1024;  // a flag and statistics of rows; also the alignment of the tiles
constexpr int mma_backward_warps = 8;

inline std::int64_t mma_tiles(std::int64_t rows, int block) { return (rows + block - 1) / block; }

/// Bytes of a tile::SwizzledTile: panels of 128 bytes a row.
int swizzled_tile_bytes(Dtype dtype, int rows, std::int64_t columns);
int swizzled_tile_bytes(const Problem& problem, int rows, std::int64_t columns);  // of Problem::dtype

/// Whether products are those of forward/fp32 and backward/fp32.
bool has_fp32_products(const Problem& problem);

/// Why none of these families takes the problem, apart from the width of heads.
std::string reject_mma_problem(const Problem& problem, const DeviceInfo& device, std::int64_t max_dim = 256);

struct MmaForwardTile {
  int block_q, block_kv, num_warps;

  int shared_bytes(const Problem& problem) const;
  /// Why a requested tile does not fit; empty if it does.
  std::string reject_size(const Problem& problem, const DeviceInfo& device) const;
};

/// Adds the key masses after a forward kernel: by mma.sync if possible, otherwise on CUDA cores.
void add_sm80_key_mass_launch(const Problem& problem, Plan& plan);
/// The same by wgmma, for 16-bit types; wide heads by mma.sync.
void add_sm90_key_mass_launch(const Problem& problem, Plan& plan);

Plan lay_out_mma_forward(const Problem& problem, const MmaForwardTile& tile, std::string unit, std::string entry);

struct MmaBackwardTile {
  int block_q, block_kv, num_stages;

  int shared_bytes(const Problem& problem) const;
};

std::optional<MmaBackwardTile> first_that_fits(std::initializer_list<MmaBackwardTile> tiles, const Problem& problem,
                                               const DeviceInfo& device);

/// For the kernel that computes only dQ: 16 queries a warp.
struct MmaQueryTile {
  static constexpr int block_q = 16 * mma_backward_warps;
  int block_kv;

  int shared_bytes(const Problem& problem) const;
};

/// The kernel for dQ is `entry`_dq or `entry`_finish_dq.
struct MmaBackwardNames {
  std::string unit, dq_unit, entry;
};

Plan lay_out_mma_backward(const Problem& problem, const MmaBackwardTile& tile, const MmaQueryTile& queries,
                          const MmaBackwardNames& names);

/// Why a tile is missing; that of dQ only counts if a separate kernel computes dQ.
std::string reject_mma_backward(const Problem& problem, const DeviceInfo& device,
                                const std::optional<MmaBackwardTile>& tile, const MmaQueryTile& queries);

/// The two rows of a family. The family has its own names, requirements and functions; the kernels have the same
/// capabilities.
std::array<KernelEntry, 2> mma_rows(KernelEntry forward, KernelEntry backward);

}  // namespace flash_attention::plan
