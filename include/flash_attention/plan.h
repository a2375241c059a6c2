#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "flash_attention/device.h"
#include "flash_attention/export.h"
#include "flash_attention/problem.h"

namespace flash_attention {

namespace plan {
struct KernelConfig;
}

/// The template argument of a kernel: one of the library's own types, or C++ text for a kernel outside of all plans.
/// The just-in-time compiler prints it (to_source).
class LaunchConfig {
 public:
  LaunchConfig() = default;  ///< none: the entry is not a template
  FLASH_ATTENTION_API LaunchConfig(std::string source);
  LaunchConfig(const char* source) : LaunchConfig(std::string(source)) {}
  explicit LaunchConfig(std::shared_ptr<const plan::KernelConfig> value) : value_(std::move(value)) {}

  const plan::KernelConfig* value() const { return value_.get(); }  ///< null: none

  /// Whether both print the same text.
  FLASH_ATTENTION_API friend bool operator==(const LaunchConfig& x, const LaunchConfig& y);

 private:
  std::shared_ptr<const plan::KernelConfig> value_;
};

/// C++ source: "ForwardConfig{.features = {...}, .head_dim = 64, ...}"; empty if there is none.
FLASH_ATTENTION_API std::string to_source(const LaunchConfig& config);

/// A tile of the score matrix.
struct TileSize {
  int block_q = 0;   ///< queries
  int block_kv = 0;  ///< keys

  friend bool operator==(const TileSize&, const TileSize&) = default;
};

/// A part of a backward pass over blocks of keys. All parts share one workspace, with one sum of dQ.
struct BackwardPart {
  enum class Kind : std::uint8_t {
    rows,   ///< first: statistics of `rows` rows; sets their sums of dQ to 0
    block,  ///< dK and dV of one block, whose queries are rows `first`, `first` + 1, ... of these; adds its share of dQ
    dq,     ///< last: dQ of the rows
  };
  Kind kind = Kind::rows;
  int rows = 0;    ///< of the pass
  int first = 0;   ///< of a block
  int number = 0;  ///< of a block: blocks may run at the same time

  friend bool operator==(const BackwardPart&, const BackwardPart&) = default;
};

/// One GPU kernel launch: its unit of kernels/, its configuration, its size.
struct Launch {
  std::string unit;   ///< file below kernels/ without its ending, e.g. "forward/portable"
  std::string entry;  ///< the template in it, e.g. "forward_portable"
  LaunchConfig config{};
  std::array<int, 3> grid{1, 1, 1};
  int block = 1;
  int cluster = 1;
  int shared_bytes = 0;
  int min_blocks_per_sm = 1;
  /// keep each SM's memory divided as for neighbouring kernels that need much shared memory
  bool prefer_shared_carveout = false;
  /// begin before the previous launch has ended (griddepcontrol); not for the first launch
  bool programmatic_launch = false;
  std::string arguments = "AttentionArgs";  ///< the type of its parameter
  std::string prelude{};                    ///< C++ before the unit: a program's source

  friend bool operator==(const Launch&, const Launch&) = default;
};

/// A kernel that could have been chosen.
struct Candidate {
  std::string kernel;
  std::string reason;  ///< why not; empty for the chosen one

  friend bool operator==(const Candidate&, const Candidate&) = default;
};

/// The memory that a tensor map describes.
enum class MapSource : std::uint8_t { q, k, v, out, dout, bias, workspace };

/// A tensor map (TMA descriptor) of a kernel's launches, without its address.
struct MapLayout {
  int slot = 0;  ///< its place among the kernel's maps
  MapSource source = MapSource::q;
  std::int64_t offset = 0;  ///< in the workspace, in bytes
  Dtype dtype = Dtype::bfloat16;
  int rank = 0;
  std::array<std::uint64_t, 5> sizes{};          ///< elements, innermost first
  std::array<std::uint64_t, 4> strides_bytes{};  ///< of dimensions 1..rank-1
  std::array<std::uint32_t, 5> box{};
  int swizzle_bytes = 128;       ///< 0, 32, 64 or 128
  bool only_if_aligned = false;  ///< if the address is no multiple of 16, the kernel works without the map

  friend bool operator==(const MapLayout&, const MapLayout&) = default;
};

/// The choices of a CPU kernel, besides its tile.
struct CpuChoices {
  int heads_together = 1;    ///< key heads whose rows are read at the same time
  bool copies_keys = false;  ///< works on copies of K and V, as float and with the rows of a head adjacent
  /// a first step packs K and V for all blocks of rows; otherwise each block packs for itself
  bool packs_keys = false;
  /// up to this size, K and V of a sequence stay in the caches; if they are larger, they are prefetched
  std::int64_t cache_resident_bytes = 0;

  friend bool operator==(const CpuChoices&, const CpuChoices&) = default;
};

/// The first launch, if it classifies tiles by the masks. It writes to the end of the workspace.
struct MaskLaunch {
  bool present = false;
  int launches = 1;              ///< how many of the plan's first launches it is
  /// of its result, in bytes; with a prepared mask the result is elsewhere and the workspace ends here
  std::size_t begin = 0;
  std::size_t zeroed_bytes = 0;  ///< it also sets this many bytes to 0, from the beginning of the workspace

  friend bool operator==(const MaskLaunch&, const MaskLaunch&) = default;
};

/// How to solve a Problem on a device. A pure function makes it; it never changes.
struct Plan {
  std::string kernel{};  ///< "forward/sm90", "cpu/prefill", ...
  Pass pass = Pass::forward;
  int block_q = 0;      ///< rows of the score matrix in one tile
  int block_kv = 0;     ///< columns of the score matrix in one tile
  int num_splits = 1;   ///< parts into which the keys are divided, merged at the end
  int early_heads = 0;  ///< backward/sm90: heads whose dQ blocks convert while they compute later heads
  std::size_t workspace_bytes = 0;
  /// bytes of the workspace, from its beginning, that must be 0 before the first launch
  std::size_t zeroed_bytes = 0;
  std::array<std::int64_t, 10> workspace_offsets{};  ///< where each region of the workspace begins, in bytes
  /// rows of a workspace that several parts of a pass share; 0: one pass
  std::int64_t shared_rows = 0;
  std::vector<Launch> launches{};                    ///< CUDA and emulator; in order
  MaskLaunch mask{};                                 ///< the first launches, which a prepared mask replaces
  std::vector<MapLayout> maps{};                     ///< for all launches
  bool counts_repairs = false;                       ///< whether the kernel adds to Options::repairs
  CpuChoices cpu{};
  std::int64_t listed_blocks = -1;  ///< the place in the workspace of lists of blocks as a block mask; -1: none
  bool unproven = false;  ///< the kernel has never run on such a GPU, and has not been tested on this one
  /// the measurement behind the choice (tune.h), in words; empty: the planner chose by its rules
  std::string tuned{};
  std::vector<Candidate> candidates{};  ///< in the order in which they were considered, up to the chosen one

  friend bool operator==(const Plan&, const Plan&) = default;
};

/// The best kernel for the problem on that device. Pure: no driver call, no environment, no globals.
/// `kernel`, `tile` and `part` are those of Options. Throws Error(invalid_argument | unsupported).
FLASH_ATTENTION_API Plan make_plan(const Problem& problem, Pass pass, const DeviceInfo& device,
                                   std::string_view kernel = {}, std::optional<TileSize> tile = {},
                                   std::optional<BackwardPart> part = {});

/// A kernel of the library, and its capabilities.
struct KernelSummary {
  std::string name;
  Pass pass;
  DeviceKind device;
  std::string requirements;  ///< in words
  std::vector<int> proven;   ///< GPU: architectures on which it was run, checked and timed
};
FLASH_ATTENTION_API std::vector<KernelSummary> kernels();

FLASH_ATTENTION_API std::string to_string(const Plan& plan);

}  // namespace flash_attention
