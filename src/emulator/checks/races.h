#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <string>
#include <unordered_map>
#include <vector>

namespace flash_attention::emulator {

struct Block;
struct SharedPlace;
struct Thread;
struct Warp;

/// How far one actor knows every other to have come: what actor a did up to known[a] happened before. Actors are the
/// threads of the cluster, then its warpgroups as users of wgmma, then the launch before, then its mbarriers as those who
/// announce bulk copies.
using Clocks = std::vector<std::uint32_t>;

void join(Clocks& known, const Clocks& other);  ///< what either of them knows
void meet(Clocks& known, const Clocks& other);  ///< what both of them know

/// Who last touched a word of memory.
struct Touch {
  enum class Kind : std::uint8_t { none, thread, copy, bulk_store, bulk_load, wgmma };
  std::uint32_t clock = 0;  // the actor's; of a copy or bulk store, its number in Races::in_flight_
  std::uint16_t actor = 0;
  Kind kind = Kind::none;
  std::uint8_t bytes = 0;  // which of the word's four
};

/// Next to the shared memory of a block: for each word of 4 bytes who wrote it last, and who of each warp read it last.
struct ShadowMemory {
  static constexpr std::size_t max_rewriters = 3;
  struct Word {
    Touch written;
    std::uint32_t readers = 0;  // warps that have read it since: a bit for each, so that a write looks at these alone
    bool rewritten = false;     // there are others who then wrote what was there already
  };
  std::vector<Word> words;
  std::vector<Touch> rewrites;  // [word][rewriter]; those of words that are not rewritten say nothing
  std::vector<Touch> reads;     // [warp][word]; the same of warps that are not among the readers
};

/// What an mbarrier passes on from those who arrive to those who wait.
struct MbarrierOrder {
  std::uint32_t actor = 0;
  std::uint32_t phases = 0;  // that have completed
  Clocks arrived, completed;
};

/// Finds two accesses to the same memory, one of them a write, that nothing orders: no barrier, mbarrier, wait or
/// __syncwarp makes the one happen before the other. Whether they met in this schedule does not matter, so a missing
/// barrier is found under every seed. Seen are the accesses through wrappers to shared memory, and to global memory by the
/// threads of a block.
class Races {
 public:
  void reset(std::vector<Block>& blocks);

  // Order. What the thread did before `release` happened before what follows an `acquire`.
  void release(Thread& thread, Clocks& into);
  void acquire(Thread& thread, const Clocks& from);
  void sync(const Warp& warp);
  void await_launch(Thread& thread) const;              ///< the thread has waited for the launch before
  bool has_awaited_launch(const Thread& thread) const;  ///< it, or one of which it knows

  MbarrierOrder& mbarrier(const Block& block, std::size_t offset);
  void complete_phase(MbarrierOrder& order);

  // Accesses of a thread to shared memory, and to global memory.
  void read(const Thread& thread, const SharedPlace& place, std::size_t bytes);
  void write(const Thread& thread, const SharedPlace& place, std::size_t bytes);
  void rewrite(const Thread& thread, const SharedPlace& place, std::size_t bytes);  ///< writes what is there already
  void read_global(const Thread& thread, const void* address, int bytes);
  void write_global(const Thread& thread, const void* address, int bytes);

  // Accesses that outlast the instruction: `finish` says that the thread has waited for them.
  std::uint32_t start_copy(const Thread& thread, const SharedPlace& place, std::size_t bytes);
  std::uint32_t start_bulk_store(const Thread& thread, const SharedPlace& place, std::size_t bytes);
  void finish(const Thread& thread, std::uint32_t number);
  void bulk_load_writes(const Thread& thread, const MbarrierOrder& order, const SharedPlace& place, std::size_t bytes);
  /// `known` by all four warps of the thread's warpgroup, whose `op`-th product it is. One that has waited knows for all.
  void wgmma_reads(const Thread& thread, const Clocks& known, std::uint32_t op, const SharedPlace& place,
                   std::size_t bytes);
  void finish_wgmma(Thread& thread, std::uint32_t ops);

 private:
  bool happened(const Touch& touch, const Clocks& known) const;
  bool a_write_happened(const ShadowMemory& shadow, std::size_t at, const Clocks& known) const;
  void check_read(const SharedPlace& place, std::size_t bytes, const Clocks& known, const Touch& touch, int warp);
  void check_write(const SharedPlace& place, std::size_t bytes, const Clocks& known, const Touch& touch);
  [[noreturn]] void report(const char* doing, const std::string& where, const Touch& other, const char* did) const;
  std::string describe(const Touch& touch) const;
  std::uint32_t warpgroups_of_block() const;
  std::uint32_t wgmma_actor(const Thread& thread) const;
  std::uint32_t launch_actor() const { return threads_ / threads_of_block_ * warpgroups_of_block() + threads_; }

  std::uint32_t threads_ = 0;  // of the cluster
  std::uint32_t threads_of_block_ = 0;
  std::uint32_t actors_ = 0;
  std::vector<std::uint32_t> in_flight_;  // the thread's clock when it had waited; 0 before
  std::map<std::pair<int, std::size_t>, MbarrierOrder> mbarriers_;
  std::unordered_map<std::uintptr_t, Touch> global_writes_;  // by word
};

}  // namespace flash_attention::emulator
