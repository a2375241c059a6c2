#pragma once

#include <array>
#include <cstdint>
#include <string>
#include <vector>

#include "flash_attention/export.h"

namespace flash_attention::emulator {

/// What a warp does between two events, summed over its lanes. Only what goes through a ptx:: wrapper is seen: index
/// arithmetic, plain + and * and register moves are not.
struct Work {
  std::uint64_t fma = 0;                ///< ptx::fma, single lanes
  std::uint64_t special = 0;            ///< exponentials, logarithms, reciprocals, tanh
  std::uint64_t simple = 0;             ///< maxima, products and conversions of their own
  std::uint64_t warp_instructions = 0;  ///< shuffles, votes, matrix moves and mma.sync
  std::uint64_t shared_bytes = 0;       ///< ld.shared, st.shared, ldmatrix, stmatrix
  std::uint64_t load_bytes = 0;         ///< ld.global
  std::uint64_t store_bytes = 0;        ///< st.global, red.global
  std::uint64_t mma_flops = 0;          ///< mma.sync
  std::uint64_t copy_bytes = 0;         ///< cp.async, until its commit

  Work& operator+=(const Work& other);
  bool empty() const;
};

/// What other warps, the copy engine or the tensor cores have to do with.
enum class EventKind : std::uint8_t {
  barrier_arrive,  // bar.arrive: id, generation
  barrier_sync,    // bar.sync, __syncthreads
  cluster_arrive,  // generation
  cluster_wait,
  mbarrier_arrive,  // barrier, phase
  mbarrier_wait,
  bulk_load,   // TMA or a bulk copy that completes a phase of an mbarrier: bytes
  bulk_store,  // bytes
  bulk_commit,
  bulk_wait,       // until all but the last `amount` groups are in memory
  bulk_wait_read,  // until they have been read
  store_async,     // to another block's shared memory, with its mbarrier: bytes
  copy_commit,     // cp.async: bytes
  copy_wait,
  wgmma,  // one product of the warpgroup: ordinal, columns
  wgmma_commit,
  wgmma_wait,
};
const char* to_string(EventKind kind);

/// Whose mbarrier: the block's rank in its cluster and the offset in shared memory. Which named barrier: its id.
struct Place {
  int rank = 0;
  std::uint32_t offset = 0;
  friend auto operator<=>(const Place&, const Place&) = default;
};

struct Event {
  EventKind kind{};
  Place place{};              ///< of barriers
  std::int64_t number = 0;    ///< of the phase (-1: none is waited for), generation, product, group or wait
  std::uint32_t amount = 0;   ///< bytes, arrivals, columns of a product, groups that may stay open
  std::uint32_t targets = 1;  ///< a bit for each block of the cluster that a load goes to
  std::uint32_t barrier = 0;  ///< offset of the mbarrier that a load or store counts for; its rank is that of `place`
  bool a_in_shared = false;   ///< of a product
  Work before{};              ///< since the event before

  bool same_as(const Event& other) const { return kind == other.kind && place == other.place && number == other.number; }
};

struct WarpRecord {
  std::vector<Event> events;
  Work after;  ///< the last event
};

struct BlockRecord {
  std::array<unsigned, 3> index{};
  int rank = 0;
  std::vector<WarpRecord> warps;
};

/// The blocks of a launch that were recorded: cluster after cluster.
struct LaunchRecord {
  std::string unit;   ///< "forward/sm90"
  std::string entry;  ///< the name of the compiled unit
  std::array<unsigned, 3> grid{};
  int threads = 0;
  int cluster = 1;
  int shared_bytes = 0;
  int blocks_per_sm = 1;               ///< that the plan wants on an SM at least
  std::vector<std::int64_t> clusters;  ///< number of each recorded cluster, in the order of `blocks`
  std::vector<BlockRecord> blocks;

  std::int64_t num_blocks() const;
};

/// Which clusters of each launch are recorded.
struct RecordRequest {
  int clusters = 1;        ///< so many, spread evenly over the grid
  std::int64_t only = -1;  ///< this one instead
  bool alone = false;      ///< other clusters do not run, so results are not complete
};

/// From now on launches of this process are recorded.
FLASH_ATTENTION_API void start_recording(const RecordRequest& request);
/// Stops, and gives the launches since in their order.
FLASH_ATTENTION_API std::vector<LaunchRecord> stop_recording();

}  // namespace flash_attention::emulator
