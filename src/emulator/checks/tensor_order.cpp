#include "emulator/checks/tensor_order.h"

#include <algorithm>

#include "emulator/machine/scheduler.h"

namespace flash_attention::emulator {
namespace {

std::uint32_t knows_of(const Clocks& known, std::uint32_t actor) { return actor < known.size() ? known[actor] : 0; }

int index_of(const Warp& warp) { return warp.lanes.front()->index / 32; }

const Thread& first_of(const Warp& warp) { return *warp.lanes.front(); }
const Thread& first_of(const Thread& thread) { return thread; }

}  // namespace

void TensorOrder::begin(std::uint32_t first_actor, int warps) {
  first_actor_ = first_actor;
  warps_.assign(static_cast<std::size_t>(warps), {});
  shadow_.assign(std::size_t{quarters} * columns, {});
}

bool TensorOrder::is_known(const TensorTouch& touch, const Thread& thread) const {
  const int warp = thread.index / 32;
  const WarpCount& own = warps_[static_cast<std::size_t>(warp)];
  if (touch.kind == TensorTouch::Kind::load && touch.actor == load_actor(warp)) return touch.number <= own.loads_done;
  if (touch.kind == TensorTouch::Kind::store && touch.actor == store_actor(warp)) return touch.number <= own.stores_done;
  return touch.number <= knows_of(thread.tensor_known, touch.actor);
}

bool TensorOrder::is_known(const TensorTouch& touch, const Warp& warp) const {
  return std::all_of(warp.lanes.begin(), warp.lanes.end(), [&](const Thread* lane) { return is_known(touch, *lane); });
}

/// The error if the viewer does not know of the touch; empty if it does.
template <class Viewer>
std::string TensorOrder::require(const TensorTouch& touch, const Viewer& viewer, const char* doing, unsigned quarter,
                                 unsigned column) const {
  if (!touch || is_known(touch, viewer)) return {};
  const bool product = touch.actor == product_actor();
  const int warp = product ? 0 : static_cast<int>(touch.actor - first_actor_) / 2;
  const std::string who = product ? "a product" : "warp " + std::to_string(warp);
  const char* did = touch.kind == TensorTouch::Kind::load ? "read" : product && touch.key == 0 ? "reads" : "wrote";
  std::string hint;
  if (!product && warp == first_of(viewer).index / 32) {
    hint = touch.kind == TensorTouch::Kind::load ? "; tmem_wait_load is missing" : "; tmem_wait_store is missing";
  } else if (touch.number <= knows_of(first_of(viewer).known, touch.actor)) {
    hint = "; tcgen05_fence_after is missing";
  }
  return std::string("race: ") + doing + " column " + std::to_string(column) + " of lanes " + std::to_string(32 * quarter) +
         " to " + std::to_string(32 * quarter + 31) + ", which " + who + " " + did + " with nothing to order the two" +
         hint;
}

/// The same for all who have touched the cells since they were written, and who wrote them.
template <class Viewer>
std::string TensorOrder::require_free(const Column& cells, const Viewer& viewer, const char* doing, unsigned quarter,
                                      unsigned column) const {
  std::string wrong = require(cells.written, viewer, doing, quarter, column);
  if (wrong.empty()) wrong = require(cells.multiplied, viewer, doing, quarter, column);
  for (std::size_t i = 0; i < cells.loaded.size() && wrong.empty(); ++i)
    wrong = require(cells.loaded[i], viewer, doing, quarter, column);
  return wrong;
}

std::string TensorOrder::load(const Warp& warp, unsigned column, unsigned count) {
  const int index = index_of(warp);
  const auto quarter = static_cast<unsigned>(index % 4);
  const TensorTouch touch{TensorTouch::Kind::load, load_actor(index), ++warps_[static_cast<std::size_t>(index)].loads};
  for (unsigned c = column; c < column + count; ++c) {
    Column& cells = at(quarter, c);
    if (!cells.written) return "reads column " + std::to_string(c) + ", to which nothing was written";
    if (std::string wrong = require(cells.written, warp, "reads", quarter, c); !wrong.empty()) return wrong;
    cells.loaded[static_cast<std::size_t>(index / 4)] = touch;
  }
  return {};
}

std::string TensorOrder::store(const Warp& warp, unsigned column, unsigned count) {
  const int index = index_of(warp);
  const auto quarter = static_cast<unsigned>(index % 4);
  const TensorTouch touch{TensorTouch::Kind::store, store_actor(index), ++warps_[static_cast<std::size_t>(index)].stores,
                          1};
  for (unsigned c = column; c < column + count; ++c) {
    Column& cells = at(quarter, c);
    if (std::string wrong = require_free(cells, warp, "writes", quarter, c); !wrong.empty()) return wrong;
    cells.written = touch;
    cells.multiplied = {};
    cells.loaded.fill({});
  }
  return {};
}

std::string TensorOrder::accumulate(const Thread& thread, unsigned column, unsigned count, AccumulatorKey key, bool reads) {
  const TensorTouch touch{TensorTouch::Kind::product, product_actor(), products_, key};
  for (unsigned quarter = 0; quarter < quarters; ++quarter) {
    for (unsigned c = column; c < column + count; ++c) {
      Column& cells = at(quarter, c);
      if (reads && !cells.written) return "adds to column " + std::to_string(c) + ", to which nothing was written";
      const bool in_order = cells.written.kind == TensorTouch::Kind::product && cells.written.key == key;
      const TensorTouch written = cells.written;
      if (in_order) cells.written = {};  // the pipeline's own order
      const std::string wrong = require_free(cells, thread, "a product writes", quarter, c);
      cells.written = written;
      if (!wrong.empty()) return wrong;
      cells.written = touch;
      cells.multiplied = {};
      cells.loaded.fill({});
    }
  }
  return {};
}

std::string TensorOrder::multiply(const Thread& thread, unsigned column, unsigned count) {
  const TensorTouch touch{TensorTouch::Kind::product, product_actor(), products_, 0};
  for (unsigned quarter = 0; quarter < quarters; ++quarter) {
    for (unsigned c = column; c < column + count; ++c) {
      Column& cells = at(quarter, c);
      if (!cells.written) return "multiplies column " + std::to_string(c) + ", to which nothing was written";
      if (std::string wrong = require(cells.written, thread, "a product reads", quarter, c); !wrong.empty()) return wrong;
      cells.multiplied = touch;
    }
  }
  return {};
}

std::string TensorOrder::release(const Warp& warp, unsigned column, unsigned count) const {
  for (unsigned quarter = 0; quarter < quarters; ++quarter) {
    for (unsigned c = column; c < column + count; ++c) {
      if (std::string wrong = require_free(at(quarter, c), warp, "gives back", quarter, c); !wrong.empty()) return wrong;
    }
  }
  return {};
}

void TensorOrder::publish(Thread& thread) const {
  if (warps_.empty()) return;
  const int warp = thread.index / 32;
  const WarpCount& own = warps_[static_cast<std::size_t>(warp)];
  if (thread.known.size() <= store_actor(warp)) thread.known.resize(store_actor(warp) + 1);
  thread.known[load_actor(warp)] = own.loads_done;
  thread.known[store_actor(warp)] = own.stores_done;
}

}  // namespace flash_attention::emulator
