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

/// What a kernel is compiled for, its template argument: one of the library's own types, or C++ text for a kernel outside
/// of all plans. The just-in-time compiler prints it (to_source).
class LaunchConfig {
 public:
  LaunchConfig() = default;  ///< none: the entry is no template
  FLASH_ATTENTION_API LaunchConfig(std::string source);
  LaunchConfig(const char* source) : LaunchConfig(std::string(source)) {}
  explicit LaunchConfig(std::shared_ptr<const plan::KernelConfig> value) : value_(std::move(value)) {}

  const plan::KernelConfig* value() const { return value_.get(); }  ///< null: none

  /// Whether both print alike.
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

/// A part of a backward pass over blocks of keys. All parts share one workspace, and in it one sum of dQ.
struct BackwardPart {
  enum class Kind : std::uint8_t {
    rows,   ///< first: statistics of `rows` rows, whose sums of dQ become 0
    block,  ///< dK and dV of one block, whose queries are rows `first`, `first` + 1, ... of these, and its share of dQ
    dq,     ///< last: dQ of the rows
  };
  Kind kind = Kind::rows;
  int rows = 0;    ///< of the pass
  int first = 0;   ///< of a block
  int number = 0;  ///< of a block: blocks may run at once

  friend bool operator==(const BackwardPart&, const BackwardPart&) = default;
};

/// One GPU kernel launch: which unit of kernels/, how it is configured, how large.
struct Launch {
  std::string unit;   ///< file below kernels/ without its ending, e.g. "forward/portable"
  std::string entry;  ///< the template in it, e.g. "forward_portable"
  LaunchConfig config{};
  std::array<int, 3> grid{1, 1, 1};
  int block = 1;
  int cluster = 1;
  int shared_bytes = 0;
  int min_blocks_per_sm = 1;
  bool prefer_shared_carveout = false;  ///< SMs keep their memory divided as neighbours with much shared memory need it
  bool programmatic_launch = false;  ///< before the launch before it has ended: it waits itself, and not as the first one
  std::string arguments = "AttentionArgs";  ///< the type of its parameter
  std::string prelude{};                    ///< C++ that comes before the unit: a program's source

  friend bool operator==(const Launch&, const Launch&) = default;
};

/// A kernel that could have been chosen.
struct Candidate {
  std::string kernel;
  std::string reason;  ///< why not; empty for the chosen one

  friend bool operator==(const Candidate&, const Candidate&) = default;
};

/// Where the memory is that a tensor map describes.
enum class MapSource : std::uint8_t { q, k, v, out, dout, bias, workspace };

/// A tensor map (TMA descriptor) of a kernel's launches, but for its address.
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
  bool only_if_aligned = false;  ///< the kernel does without it if the address is no multiple of 16

  friend bool operator==(const MapLayout&, const MapLayout&) = default;
};

/// What a CPU kernel is told besides its tile.
struct CpuChoices {
  int heads_together = 1;    ///< key heads whose rows are read together
  bool copies_keys = false;  ///< it works on copies of K and V, as float and with the rows of a head together
  bool packs_keys = false;   ///< a first step packs K and V for all blocks of rows; else a block does for itself
  std::int64_t cache_resident_bytes = 0;  ///< K and V of a sequence that stay in the caches: more is prefetched

  friend bool operator==(const CpuChoices&, const CpuChoices&) = default;
};

/// The first launch, where it finds out which tiles the masks show. What it writes is the end of the workspace.
struct MaskLaunch {
  bool present = false;
  int launches = 1;              ///< the first of the plan
  std::size_t begin = 0;         ///< of what it writes, in bytes: all of the workspace where that is kept elsewhere
  std::size_t zeroed_bytes = 0;  ///< that it sets to 0 besides, from the beginning of the workspace

  friend bool operator==(const MaskLaunch&, const MaskLaunch&) = default;
};

/// How a Problem is solved on a device. Made by a pure function, constant once made.
struct Plan {
  std::string kernel{};  ///< "forward/sm90", "cpu/prefill", ...
  Pass pass = Pass::forward;
  int block_q = 0;     ///< rows of the score matrix in one tile
  int block_kv = 0;    ///< columns of the score matrix in one tile
  int num_splits = 1;  ///< parts the keys are divided into, merged at the end
  std::size_t workspace_bytes = 0;
  std::size_t zeroed_bytes = 0;                      ///< of the workspace, from its beginning: 0 before the first launch
  std::array<std::int64_t, 10> workspace_offsets{};  ///< where each region of the workspace begins, in bytes
  std::int64_t shared_rows = 0;                      ///< of a workspace that several parts of a pass share; 0: one pass
  std::vector<Launch> launches{};                    ///< CUDA and emulator; in order
  MaskLaunch mask{};                                 ///< the first of them, which a prepared mask replaces
  std::vector<MapLayout> maps{};                     ///< for all launches
  bool counts_repairs = false;                       ///< it adds to Options::repairs
  CpuChoices cpu{};
  std::int64_t listed_blocks = -1;  ///< where the workspace has lists of blocks as a block mask; -1: nowhere
  bool unproven = false;  ///< the kernel was never run on such a GPU, and has not been tested on this one
  std::string tuned{};    ///< what was measured for it (tune.h), in words; empty: the planner chose by its rules
  std::vector<Candidate> candidates{};  ///< in the order in which they were considered, up to the chosen one

  friend bool operator==(const Plan&, const Plan&) = default;
};

/// The best kernel for the problem on that device. Pure: no driver call, no environment, no globals.
/// `kernel`, `tile` and `part` are those of Options. Throws Error(invalid_argument | unsupported).
FLASH_ATTENTION_API Plan make_plan(const Problem& problem, Pass pass, const DeviceInfo& device,
                                   std::string_view kernel = {}, std::optional<TileSize> tile = {},
                                   std::optional<BackwardPart> part = {});

/// A kernel the library has, and what it can do.
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
