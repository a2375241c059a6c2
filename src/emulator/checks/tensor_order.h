#pragma once

#include <array>
#include <cstdint>
#include <string>
#include <vector>

namespace flash_attention::emulator {

struct Block;
struct Thread;
struct Warp;

/// Which products are executed in the order in which they were issued: those with the same accumulator and shape.
using AccumulatorKey = std::uint64_t;

/// Who touched a column of 32 lanes last.
struct TensorTouch {
  enum class Kind : std::uint8_t { none, load, store, product };
  Kind kind = Kind::none;
  std::uint32_t actor = 0;
  std::uint32_t number = 0;  // of the actor's operations
  AccumulatorKey key = 0;    // of a product that wrote

  explicit operator bool() const { return kind != Kind::none; }
};

/// Finds two accesses to the same tensor memory, one of them a write, that nothing orders. A warp's loads and stores are
/// ordered for itself by its waits. Other warps know of them by a wait, tcgen05_fence_before and a barrier, and of products
/// by the mbarrier of a tcgen05_commit; what a thread knows counts from its tcgen05_fence_after on. Products of one
/// accumulator and shape are in order; others are not, even of one thread.
///
/// Actors of Clocks are the loads of each warp, the stores of each warp, and the products of the block.
class TensorOrder {
 public:
  void begin(std::uint32_t first_actor, int warps);

  // What a warp does with columns [column, column + count) of its 32 lanes. Each returns what is wrong, or nothing.
  std::string load(const Warp& warp, unsigned column, unsigned count);
  std::string store(const Warp& warp, unsigned column, unsigned count);
  /// What a product does in all lanes: with its accumulator, then with A.
  std::string accumulate(const Thread& thread, unsigned column, unsigned count, AccumulatorKey key, bool reads);
  std::string multiply(const Thread& thread, unsigned column, unsigned count);
  /// A warp gives columns back.
  std::string release(const Warp& warp, unsigned column, unsigned count) const;

  void finish_loads(int warp) {
    warps_[static_cast<std::size_t>(warp)].loads_done = warps_[static_cast<std::size_t>(warp)].loads;
  }
  void finish_stores(int warp) {
    warps_[static_cast<std::size_t>(warp)].stores_done = warps_[static_cast<std::size_t>(warp)].stores;
  }
  /// tcgen05_fence_before: the thread may tell others what its warp has waited for.
  void publish(Thread& thread) const;

  std::uint32_t product_actor() const { return first_actor_ + 2 * static_cast<std::uint32_t>(warps_.size()); }
  std::uint32_t next_product() { return ++products_; }

 private:
  static constexpr std::size_t most_warpgroups = 8;
  struct WarpCount {
    std::uint32_t loads = 0, loads_done = 0, stores = 0, stores_done = 0;
  };
  struct Column {
    TensorTouch written;
    TensorTouch multiplied;                           // was A of a product
    std::array<TensorTouch, most_warpgroups> loaded;  // by the warp of each warpgroup that reaches these lanes
  };
  static constexpr unsigned quarters = 4, columns = 512;

  Column& at(unsigned quarter, unsigned column) { return shadow_[quarter * columns + column]; }
  const Column& at(unsigned quarter, unsigned column) const { return shadow_[quarter * columns + column]; }
  std::uint32_t load_actor(int warp) const { return first_actor_ + 2 * static_cast<std::uint32_t>(warp); }
  std::uint32_t store_actor(int warp) const { return load_actor(warp) + 1; }
  bool is_known(const TensorTouch& touch, const Warp& warp) const;
  bool is_known(const TensorTouch& touch, const Thread& thread) const;
  template <class Viewer>
  std::string require(const TensorTouch& touch, const Viewer& viewer, const char* doing, unsigned quarter,
                      unsigned column) const;
  template <class Viewer>
  std::string require_free(const Column& cells, const Viewer& viewer, const char* doing, unsigned quarter,
                           unsigned column) const;

  std::uint32_t first_actor_ = 0;
  std::uint32_t products_ = 0;
  std::vector<WarpCount> warps_;
  std::vector<Column> shadow_;
};

}  // namespace flash_attention::emulator
