#pragma once

#include <optional>
#include <array>
#include <span>
#include <string>
#include <string_view>

#include "flash_attention/plan.h"
#include "plan/request.h"
#include "plan/tuned.h"

namespace flash_attention::plan {

/// Options that a kernel takes, whatever the sizes. The planner checks them in one place for all kernels.
struct Capabilities {
  bool pages = false;             // K and V in pages
  bool left_padding = false;      // Problem::left_padding
  bool invariant = false;         // forward: Problem::invariant
  bool hidden_rows = false;       // Problem::hidden_rows
  bool block_mask = false;        // Problem::block_mask
  bool programs = false;          // Problem::program
  bool narrow_keys = false;       // K and V in 8 bits
  bool grouped_keys = false;      // K and V in 4 bits
  bool narrow_queries = false;    // Q in 8 bits
  bool latent = false;            // keys that begin with their values
  bool tile = false;              // Request::tile
  bool stages = false;            // Request::num_stages
  bool splits = false;            // Request::num_splits
  bool parts = false;             // Request::part
  bool key_list = false;          // Problem::key_list
  bool statistics = false;        // Problem::return_max_logit, _key_mass, _entropy
  bool bit_mask = false;          // Problem::bit_mask
  bool sequence_windows = false;  // Problem::sequence_windows
};

/// With more queries of a sequence, one tile of rows for each query head is as good as a kernel of decoding.
inline constexpr std::int64_t max_decode_queries = 16;

/// Architectures on which kernels were run, checked and timed: only an H200. On others they are tested before their
/// first use.
inline constexpr std::array run_on_h200{90};

/// One row of the kernel table. The planner uses the first row that serves the pass and the device and offers a plan.
struct KernelEntry {
  std::string_view name;
  Pass pass;
  DeviceKind device;  // rows for cuda serve the emulator too
  std::string_view requirements;
  Capabilities takes{};
  std::span<const int> proven{};  // GPU: architectures on which it was run, checked and timed
  bool automatic = true;        // false: only if requested by name (the ladder)
  bool prefill = false;         // a kernel for many queries, to which Offer::prefers_prefill refers
  bool counts_repairs = false;  // adds to Options::repairs

  /// Returns a plan (block sizes, launches, tensor maps, workspace), or why the kernel cannot take the request. The
  /// planner adds the parts that are the same for every kernel.
  Answer (*plan)(const Request& request);
};

// The families, each in a separate file; kernel_table.cpp puts them in order, the fastest first.
std::span<const KernelEntry> cpu_kernels();
std::span<const KernelEntry> mla_kernels();
std::span<const KernelEntry> decode_kernels();
std::span<const KernelEntry> sm90_fp8_kernels();
std::span<const KernelEntry> sm89_fp8_kernels();
std::span<const KernelEntry> sm90_kernels();
std::span<const KernelEntry> sm100_kernels();
std::span<const KernelEntry> sm80_kernels();
std::span<const KernelEntry> tf32_kernels();
std::span<const KernelEntry> fp32_kernels();
std::span<const KernelEntry> portable_kernels();
std::span<const KernelEntry> tangent_kernels();
std::span<const KernelEntry> listed_kernels();
std::span<const KernelEntry> standard_kernels();
std::span<const KernelEntry> ladder_kernels();
std::span<const KernelEntry> cpu_ladder_kernels();

/// Queries of a block of the CPU kernels: the lanes of a register tile's vectors.
int cpu_block_q(CpuIsa isa);

std::span<const KernelEntry> kernel_table();

/// Kernels that take everything, so that something always runs. No other kernel replaces them.
inline bool is_last_resort(const KernelEntry& entry) {
  return entry.name.ends_with("/portable") || entry.name.ends_with("/listed") || entry.name.starts_with("standard/");
}

/// Whether a GPU kernel has never run on such a GPU.
bool is_unproven(const KernelEntry& entry, const DeviceInfo& device);

/// An option of the problem that the kernel never takes, whatever the sizes; empty if it takes all.
std::string missing_option(const KernelEntry& entry, const Request& request);

/// The order of sums for invariant bits: docs/numerics.md, "Invariant bits". It follows from types, dimensions and
/// options, and from nothing that changes from call to call.
struct FixedOrder {
  int block_kv = 0;        // keys that raise the maximum together
  int segment_blocks = 0;  // blocks of a segment, which has a separate maximum, sum and output

  friend bool operator==(const FixedOrder&, const FixedOrder&) = default;
};
/// The most keys for which a GPU keeps this order.
constexpr std::int64_t max_invariant_keys = 524288;

/// The order of decode/sm80, decode/sm90 and forward/sm90, if bits must be invariant and these are the kernels of all
/// calls like this one, whatever their size.
std::optional<FixedOrder> fixed_order(const Request& request);

/// The plan of a kernel for a choice; nothing if it does not take the choice.
std::optional<Plan> plan_choice(const Problem& problem, Pass pass, const DeviceInfo& device, const Choice& choice);

/// The planner proper: the problem is validated and normalised.
Plan choose(const Problem& problem, Pass pass, const DeviceInfo& device, std::string_view kernel = {},
            std::optional<TileSize> tile = {}, std::optional<BackwardPart> part = {});

}  // namespace flash_attention::plan
