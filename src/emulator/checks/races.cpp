#include "emulator/checks/races.h"

#include <algorithm>
#include <bit>

#include "emulator/machine/address.h"
#include "support/clones.h"

namespace flash_attention::emulator {
namespace {

constexpr std::size_t word_bytes = 4;
constexpr std::uint32_t threads_of_warpgroup = 128;

std::uint32_t knows_of(const Clocks& known, std::size_t actor) { return actor < known.size() ? known[actor] : 0; }

/// Lanes of a warp may write the same word with the same instruction: one of them wins.
bool same_warp(const Touch& a, const Touch& b) {
  return a.kind == Touch::Kind::thread && b.kind == Touch::Kind::thread && a.actor / 32 == b.actor / 32;
}

/// Calls visit(word, its touched bytes).
template <typename Visit>
void for_each_word(std::size_t begin, std::size_t bytes, Visit visit) {
  const std::size_t end = begin + bytes;
  for (std::size_t at = begin / word_bytes; at * word_bytes < end; ++at) {
    unsigned mask = 0xf;
    if (at * word_bytes < begin) mask &= 0xfu << (begin - at * word_bytes);
    if ((at + 1) * word_bytes > end) mask &= 0xfu >> ((at + 1) * word_bytes - end);
    visit(at, static_cast<std::uint8_t>(mask & 0xf));
  }
}

/// Works in steps of a constant length, which the compiler turns into vectors.
FLASH_ATTENTION_CLONES void raise(std::uint32_t* __restrict known, const std::uint32_t* __restrict other,
                                  std::size_t count) {
  constexpr std::size_t step = 16;
  std::size_t i = 0;
  for (; i + step <= count; i += step) {
    for (std::size_t j = 0; j < step; ++j) known[i + j] = known[i + j] < other[i + j] ? other[i + j] : known[i + j];
  }
  for (; i < count; ++i) known[i] = std::max(known[i], other[i]);
}

}  // namespace

void join(Clocks& known, const Clocks& other) {
  if (known.size() < other.size()) known.resize(other.size());
  raise(known.data(), other.data(), other.size());
}

void meet(Clocks& known, const Clocks& other) {
  if (known.size() > other.size()) known.resize(other.size());
  for (std::size_t i = 0; i < known.size(); ++i) known[i] = std::min(known[i], other[i]);
}

void Races::reset(std::vector<Block>& blocks) {
  threads_of_block_ = static_cast<std::uint32_t>(blocks.front().threads.size());
  const auto count = static_cast<std::uint32_t>(blocks.size());
  threads_ = count * threads_of_block_;
  actors_ = launch_actor() + 1;
  in_flight_.clear();
  mbarriers_.clear();
  global_writes_.clear();
  for (Block& block : blocks) {
    ShadowMemory& shadow = block.shadow;
    shadow.words.assign(block.shared.size() / word_bytes + 1, {});
    shadow.rewrites.resize(shadow.words.size() * ShadowMemory::max_rewriters);
    shadow.reads.resize(shadow.words.size() * block.warps.size());
    for (Thread& thread : block.threads) {
      thread.actor = static_cast<std::uint32_t>(block.rank) * threads_of_block_ + static_cast<std::uint32_t>(thread.index);
      thread.known.assign(actors_, 0);
      thread.known[thread.actor] = 1;
    }
  }
}

std::uint32_t Races::warpgroups_of_block() const {
  return (threads_of_block_ + threads_of_warpgroup - 1) / threads_of_warpgroup;
}

std::uint32_t Races::wgmma_actor(const Thread& thread) const {
  return threads_ + static_cast<std::uint32_t>(thread.block->rank) * warpgroups_of_block() +
         static_cast<std::uint32_t>(thread.index) / threads_of_warpgroup;
}

void Races::release(Thread& thread, Clocks& into) {
  join(into, thread.known);
  ++thread.known[thread.actor];
}

void Races::acquire(Thread& thread, const Clocks& from) { join(thread.known, from); }

void Races::sync(const Warp& warp) {
  Clocks all;
  for (Thread* lane : warp.lanes) release(*lane, all);
  for (Thread* lane : warp.lanes) acquire(*lane, all);
}

void Races::await_launch(Thread& thread) const { thread.known[launch_actor()] = 1; }

bool Races::has_awaited_launch(const Thread& thread) const { return knows_of(thread.known, launch_actor()) != 0; }

MbarrierOrder& Races::mbarrier(const Block& block, std::size_t offset) {
  MbarrierOrder& order = mbarriers_[{block.rank, offset}];
  if (order.actor == 0) order.actor = actors_++;
  return order;
}

void Races::complete_phase(MbarrierOrder& order) {
  join(order.completed, order.arrived);
  order.arrived.clear();
  if (order.completed.size() <= order.actor) order.completed.resize(order.actor + 1);
  order.completed[order.actor] = ++order.phases;
}

bool Races::happened(const Touch& touch, const Clocks& known) const {
  switch (touch.kind) {
    case Touch::Kind::none:
      return true;
    case Touch::Kind::thread:
    case Touch::Kind::bulk_load:
    case Touch::Kind::wgmma:
    case Touch::Kind::tensor_product:
      return knows_of(known, touch.actor) >= touch.clock;
    case Touch::Kind::copy:
    case Touch::Kind::bulk_store: {
      const std::uint32_t waited = in_flight_[touch.clock];
      return waited != 0 && knows_of(known, touch.actor) >= waited;
    }
  }
  return true;
}

/// All threads that wrote a word wrote the same value, so it is enough to know of one.
bool Races::a_write_happened(const ShadowMemory& shadow, std::size_t at, const Clocks& known) const {
  const ShadowMemory::Word& word = shadow.words[at];
  if (happened(word.written, known)) return true;
  if (!word.rewritten) return false;
  const Touch* others = shadow.rewrites.data() + at * ShadowMemory::max_rewriters;
  return std::any_of(others, others + ShadowMemory::max_rewriters,
                     [&](const Touch& other) { return other.kind != Touch::Kind::none && happened(other, known); });
}

void Races::check_read(const SharedPlace& place, std::size_t bytes, const Clocks& known, const Touch& touch, int warp) {
  ShadowMemory& shadow = place.block->shadow;
  Touch* reads = shadow.reads.data() + static_cast<std::size_t>(warp) * shadow.words.size();
  const std::uint32_t reader = 1u << warp;
  for_each_word(place.offset, bytes, [&](std::size_t at, std::uint8_t mask) {
    ShadowMemory::Word& word = shadow.words[at];
    if ((word.written.bytes & mask) != 0 && !a_write_happened(shadow, at, known))
      report("reads", "shared offset " + std::to_string(at * word_bytes), word.written, "wrote");
    word.readers |= reader;
    reads[at] = touch;
    reads[at].bytes = mask;
  });
}

void Races::check_write(const SharedPlace& place, std::size_t bytes, const Clocks& known, const Touch& touch) {
  ShadowMemory& shadow = place.block->shadow;
  for_each_word(place.offset, bytes, [&](std::size_t at, std::uint8_t mask) {
    ShadowMemory::Word& word = shadow.words[at];
    if ((word.written.bytes & mask) != 0 && !same_warp(word.written, touch) && !happened(word.written, known))
      report("writes", "shared offset " + std::to_string(at * word_bytes), word.written, "wrote");
    for (std::uint32_t readers = word.readers; readers != 0; readers &= readers - 1) {
      const auto warp = static_cast<std::size_t>(std::countr_zero(readers));
      const Touch& read = shadow.reads[warp * shadow.words.size() + at];
      if ((read.bytes & mask) == 0) continue;
      if (!happened(read, known)) report("writes", "shared offset " + std::to_string(at * word_bytes), read, "read");
      word.readers &= ~(1u << warp);  // from now on the write stands for it
    }
    word.written = touch;
    word.written.bytes = mask;
    word.rewritten = false;
  });
}

void Races::rewrite(const Thread& thread, const SharedPlace& place, std::size_t bytes) {
  const Touch touch{thread.known[thread.actor], static_cast<std::uint16_t>(thread.actor), Touch::Kind::thread, 0xf};
  ShadowMemory& shadow = place.block->shadow;
  for_each_word(place.offset, bytes, [&](std::size_t at, std::uint8_t mask) {
    ShadowMemory::Word& word = shadow.words[at];
    if (word.written.kind != Touch::Kind::thread || (word.written.bytes & mask) != mask)
      return check_write({place.block, at * word_bytes}, word_bytes, thread.known, touch);
    Touch* others = shadow.rewrites.data() + at * ShadowMemory::max_rewriters;
    if (!word.rewritten) std::fill_n(others, ShadowMemory::max_rewriters, Touch{});
    word.rewritten = true;
    std::size_t slot = 0;
    while (slot + 1 < ShadowMemory::max_rewriters && others[slot].kind != Touch::Kind::none &&
           !same_warp(others[slot], touch))
      ++slot;
    others[slot] = touch;
  });
}

void Races::read(const Thread& thread, const SharedPlace& place, std::size_t bytes) {
  const Touch touch{thread.known[thread.actor], static_cast<std::uint16_t>(thread.actor), Touch::Kind::thread};
  check_read(place, bytes, thread.known, touch, thread.index / 32);
}

void Races::write(const Thread& thread, const SharedPlace& place, std::size_t bytes) {
  check_write(place, bytes, thread.known,
              {thread.known[thread.actor], static_cast<std::uint16_t>(thread.actor), Touch::Kind::thread});
}

void Races::read_global(const Thread& thread, const void* address, int bytes) {
  if (global_writes_.empty()) return;
  for_each_word(reinterpret_cast<std::uintptr_t>(address), static_cast<std::size_t>(bytes),
                [&](std::uintptr_t at, std::uint8_t mask) {
                  const auto written = global_writes_.find(at);
                  if (written != global_writes_.end() && (written->second.bytes & mask) != 0 &&
                      !happened(written->second, thread.known))
                    report("reads", "global memory", written->second, "wrote");
                });
}

void Races::write_global(const Thread& thread, const void* address, int bytes) {
  const Touch touch{thread.known[thread.actor], static_cast<std::uint16_t>(thread.actor), Touch::Kind::thread};
  for_each_word(reinterpret_cast<std::uintptr_t>(address), static_cast<std::size_t>(bytes),
                [&](std::uintptr_t at, std::uint8_t mask) {
                  Touch& written = global_writes_[at];
                  if ((written.bytes & mask) != 0 && !happened(written, thread.known))
                    report("writes", "global memory", written, "wrote");
                  written = touch;
                  written.bytes = mask;
                });
}

std::uint32_t Races::start_copy(const Thread& thread, const SharedPlace& place, std::size_t bytes) {
  const auto number = static_cast<std::uint32_t>(in_flight_.size());
  in_flight_.push_back(0);
  check_write(place, bytes, thread.known, {number, static_cast<std::uint16_t>(thread.actor), Touch::Kind::copy});
  return number;
}

std::uint32_t Races::start_bulk_store(const Thread& thread, const SharedPlace& place, std::size_t bytes) {
  const auto number = static_cast<std::uint32_t>(in_flight_.size());
  in_flight_.push_back(0);
  check_read(place, bytes, thread.known, {number, static_cast<std::uint16_t>(thread.actor), Touch::Kind::bulk_store},
             thread.index / 32);
  return number;
}

void Races::finish(const Thread& thread, std::uint32_t number) { finish(thread.known[thread.actor], number); }

void Races::finish(std::uint32_t moment, std::uint32_t number) {
  if (in_flight_[number] == 0) in_flight_[number] = moment;
}

void Races::bulk_load_writes(const Thread& thread, const MbarrierOrder& order, const SharedPlace& place,
                             std::size_t bytes) {
  check_write(place, bytes, thread.known,
              {order.phases + 1, static_cast<std::uint16_t>(order.actor), Touch::Kind::bulk_load});
}

void Races::wgmma_reads(const Thread& thread, const Clocks& known, std::uint32_t op, const SharedPlace& place,
                        std::size_t bytes) {
  check_read(place, bytes, known, {op, static_cast<std::uint16_t>(wgmma_actor(thread)), Touch::Kind::wgmma},
             thread.index / 32);
}

void Races::tensor_product_reads(const Thread& thread, std::uint32_t actor, std::uint32_t product, const SharedPlace& place,
                                 std::size_t bytes) {
  check_read(place, bytes, thread.known, {product, static_cast<std::uint16_t>(actor), Touch::Kind::tensor_product},
             thread.index / 32);
}

Clocks Races::known_loads(const Thread& thread) const {
  Clocks known;
  for (const auto& [place, order] : mbarriers_) {
    if (known.size() <= order.actor) known.resize(order.actor + 1);
    known[order.actor] = knows_of(thread.known, order.actor);
  }
  return known;
}

std::uint32_t Races::add_actors(std::uint32_t count) {
  const std::uint32_t first = actors_;
  actors_ += count;
  return first;
}

void Races::finish_wgmma(Thread& thread, std::uint32_t ops) {
  const std::uint32_t actor = wgmma_actor(thread);
  thread.known[actor] = std::max(thread.known[actor], ops);
}

std::string Races::describe(const Touch& touch) const {
  const auto thread = [&](std::uint32_t actor) {
    const std::string block =
        threads_ > threads_of_block_ ? " of block " + std::to_string(actor / threads_of_block_) + " of the cluster" : "";
    return "thread " + std::to_string(actor % threads_of_block_) + block;
  };
  switch (touch.kind) {
    case Touch::Kind::copy:
      return "a copy_async of " + thread(touch.actor) + (in_flight_[touch.clock] == 0 ? ", still in flight," : "");
    case Touch::Kind::bulk_store:
      return "a bulk store of " + thread(touch.actor) + (in_flight_[touch.clock] == 0 ? ", still in flight," : "");
    case Touch::Kind::bulk_load:
      for (const auto& [place, order] : mbarriers_) {
        if (order.actor == touch.actor)
          return "a bulk load that the mbarrier at shared offset " + std::to_string(place.second) + " announces";
      }
      return "a bulk load";
    case Touch::Kind::wgmma:
      return "a wgmma of warpgroup " + std::to_string((touch.actor - threads_) % warpgroups_of_block());
    case Touch::Kind::tensor_product:
      return "a product of tensor memory";
    default:
      return thread(touch.actor);
  }
}

void Races::report(const char* doing, const std::string& where, const Touch& other, const char* did) const {
  Scheduler::current().fail(std::string("race: ") + doing + " " + where + ", which " + describe(other) + " " + did +
                            " with nothing to order the two");
}

}  // namespace flash_attention::emulator
