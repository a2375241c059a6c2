#pragma once

#include <span>
#include <string>
#include <string_view>

#include "flash_attention/plan.h"
#include "plan/request.h"

namespace flash_attention::plan {

/// One row of the capability table: what a kernel can do, and how a problem is laid out for it.
/// The planner takes the first row of the table that serves the pass and the device and does not reject the problem.
struct KernelEntry {
  std::string_view name;
  Pass pass;
  DeviceKind device;  // rows for cuda serve the emulator too
  std::string_view requirements;
  bool automatic = true;        // false: only when requested by name (the ladder)
  bool pages = false;           // takes K and V in pages
  bool left_padding = false;    // takes Problem::left_padding
  bool invariant = false;       // forward: serves Problem::invariant
  bool hidden_rows = false;     // takes Problem::hidden_rows
  bool block_mask = false;      // takes Problem::block_mask
  bool programs = false;        // takes Problem::program
  bool narrow_keys = false;     // takes K and V in 8 bits
  bool narrow_queries = false;  // takes Q in 8 bits
  bool latent = false;          // takes keys that begin with their values
  bool counts_repairs = false;  // adds to Options::repairs
  TensorMapSet tensor_maps = TensorMapSet::none;

  /// Why the kernel cannot take the (normalised) problem; empty where it can.
  std::string (*reject)(const Problem& problem, const DeviceInfo& device);
  /// Block sizes, launches and workspace of a plan. The planner adds what is the same for every kernel.
  Plan (*lay_out)(const Problem& problem, const DeviceInfo& device);
  /// Why a tile of so many queries and keys does not fit; empty where it does. Null: the kernel's tile cannot be set.
  std::string (*reject_tile)(const Problem& problem, const DeviceInfo& device, const TileSize& tile) = nullptr;
  /// lay_out with that tile.
  Plan (*lay_out_tile)(const Problem& problem, const DeviceInfo& device, const TileSize& tile) = nullptr;
  /// Why a pass cannot be done in parts; empty where it can. Null: never.
  std::string (*reject_part)(const Problem& problem, const DeviceInfo& device, const BackwardPart& part) = nullptr;
  /// lay_out of a part.
  Plan (*lay_out_part)(const Problem& problem, const DeviceInfo& device, const BackwardPart& part) = nullptr;
  /// Why a kernel for many queries is better, where one of forward/sm90 and forward/sm80 takes the problem; empty where
  /// this one is. Not asked where the kernel is named. Null: it is.
  std::string (*yield)(const Problem& problem, const DeviceInfo& device) = nullptr;
};

// The families, each in a separate file; kernel_table.cpp puts them in order, the fastest first.
std::span<const KernelEntry> cpu_kernels();
std::span<const KernelEntry> mla_kernels();
std::span<const KernelEntry> decode_kernels();
std::span<const KernelEntry> sm90_fp8_kernels();
std::span<const KernelEntry> sm90_kernels();
std::span<const KernelEntry> sm80_kernels();
std::span<const KernelEntry> tf32_kernels();
std::span<const KernelEntry> portable_kernels();
std::span<const KernelEntry> standard_kernels();
std::span<const KernelEntry> ladder_kernels();
std::span<const KernelEntry> cpu_ladder_kernels();

/// Queries of a block of the CPU kernels: the lanes of a register tile's vectors.
int cpu_block_q(CpuIsa isa);

std::span<const KernelEntry> kernel_table();

/// An option of the problem that the kernel does not have at all, whatever the sizes; empty if there is none.
std::string missing_option(const KernelEntry& entry, const Problem& problem);

/// Keys of a split, where splits are fixed: the end of one costs as much as some tiles, of narrow heads more of them.
constexpr std::int64_t invariant_split_keys(const Problem& problem) {
  return problem.head_dim + problem.head_dim_v <= 128 ? 2048 : 1024;
}
/// The most keys that a GPU takes so.
constexpr std::int64_t max_invariant_keys = 524288;

/// Whether decode/sm80 is the kernel of all calls like this one, where bits are invariant, of whatever size.
bool decode_serves_invariant(const Problem& problem, const DeviceInfo& device);

/// The planner proper: the problem is validated and normalised.
Plan choose(const Problem& problem, Pass pass, const DeviceInfo& device, std::string_view asked);

}  // namespace flash_attention::plan
