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

/// An actor's knowledge of all actors: everything that actor a did up to known[a] happened before. Actors are the
/// threads of the cluster, then its warpgroups as users of wgmma, then the launch before, then its mbarriers, which
/// announce bulk copies, and users of tensor memory (checks/tensor_order.h).
using Clocks = std::vector<std::uint32_t>;

void join(Clocks& known, const Clocks& other);  ///< what either knows
void meet(Clocks& known, const Clocks& other);  ///< what both know

/// The last actor that touched a word of memory.
struct Touch {
  enum class Kind : std::uint8_t { none, thread, copy, bulk_store, bulk_load, wgmma, tensor_product };
  std::uint32_t clock = 0;  // the actor's; of a copy or bulk store, its number in Races::in_flight_
  std::uint16_t actor = 0;
  Kind kind = Kind::none;
  std::uint8_t bytes = 0;  // which of the word's four
};

/// The shadow of a block's shared memory: for each word of 4 bytes its last writer, and of each warp its last reader.
struct ShadowMemory {
  static constexpr std::size_t max_rewriters = 3;
  struct Word {
    Touch written;
    std::uint32_t readers = 0;  // one bit for each warp that has read it since, so that a write checks only these
    bool rewritten = false;     // other threads then wrote the same value again
  };
  std::vector<Word> words;
  std::vector<Touch> rewrites;  // [word][rewriter]; meaningless for words that are not rewritten
  std::vector<Touch> reads;     // [warp][word]; meaningless for warps that are not among the readers
};

/// The knowledge that an mbarrier passes from threads that arrive to threads that wait.
struct MbarrierOrder {
  std::uint32_t actor = 0;
  std::uint32_t phases = 0;  // that have completed
  Clocks arrived, completed;
};

/// Finds two accesses to the same memory, one of them a write, without an order between them: no barrier, mbarrier,
/// wait or __syncwarp makes one happen before the other. Whether they met in this schedule does not matter, so a
/// missing barrier is found under every seed. It sees accesses through wrappers to shared memory, and to global memory
/// by the threads of a block.
class Races {
 public:
  void reset(std::vector<Block>& blocks);

  // Order. Everything that the thread did before `release` happened before everything after an `acquire`.
  void release(Thread& thread, Clocks& into);
  void acquire(Thread& thread, const Clocks& from);
  void sync(const Warp& warp);
  void await_launch(Thread& thread) const;              ///< the thread has waited for the launch before
  bool has_awaited_launch(const Thread& thread) const;  ///< the thread has, or a thread that it knows of

  MbarrierOrder& mbarrier(const Block& block, std::size_t offset);
  void complete_phase(MbarrierOrder& order);

  // Accesses of a thread to shared memory, and to global memory.
  void read(const Thread& thread, const SharedPlace& place, std::size_t bytes);
  void write(const Thread& thread, const SharedPlace& place, std::size_t bytes);
  /// writes the value that is already there
  void rewrite(const Thread& thread, const SharedPlace& place, std::size_t bytes);
  void read_global(const Thread& thread, const void* address, int bytes);
  void write_global(const Thread& thread, const void* address, int bytes);

  // Accesses that outlast the instruction. `finish` says that the thread has waited for them.
  std::uint32_t start_copy(const Thread& thread, const SharedPlace& place, std::size_t bytes);
  std::uint32_t start_bulk_store(const Thread& thread, const SharedPlace& place, std::size_t bytes);
  void finish(const Thread& thread, std::uint32_t number);
  /// The same, as of an earlier moment of the thread that started it.
  void finish(std::uint32_t moment, std::uint32_t number);
  void bulk_load_writes(const Thread& thread, const MbarrierOrder& order, const SharedPlace& place, std::size_t bytes);
  /// `known` by all four warps of the thread's warpgroup, whose `op`-th product it is. If one warp has waited, all know
  /// it.
  void wgmma_reads(const Thread& thread, const Clocks& known, std::uint32_t op, const SharedPlace& place,
                   std::size_t bytes);
  void finish_wgmma(Thread& thread, std::uint32_t ops);
  /// The `product`-th product of tensor memory reads an operand. `actor` stands for those products.
  void tensor_product_reads(const Thread& thread, std::uint32_t actor, std::uint32_t product, const SharedPlace& place,
                            std::size_t bytes);

  /// The bulk loads of which the thread knows: they had landed before the products that it issues, and before their end.
  Clocks known_loads(const Thread& thread) const;

  /// So many actors more, for the rest of the cluster's run; returns the first one's number.
  std::uint32_t add_actors(std::uint32_t count);

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
