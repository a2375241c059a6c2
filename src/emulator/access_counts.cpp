#include "emulator/access_counts.h"

#include <algorithm>
#include <set>

#include "emulator/scheduler.h"

namespace flash_attention::emulator {
namespace {

constexpr int banks = 32;  // of 4 bytes
constexpr std::uint64_t sector = 32;

/// Passes for lanes that are served together: the most different words that fall into one bank.
std::uint64_t wavefronts(const std::uint64_t* addresses, std::size_t lanes, int bytes) {
  std::set<std::uint64_t> words[banks];
  for (std::size_t lane = 0; lane < lanes; ++lane) {
    const std::uint64_t last = (addresses[lane] + static_cast<std::uint64_t>(bytes) - 1) / 4;
    for (std::uint64_t word = addresses[lane] / 4; word <= last; ++word) words[word % banks].insert(word);
  }
  std::size_t most = 0;
  for (const auto& bank : words) most = std::max(most, bank.size());
  return most;
}

/// A pass moves 128 bytes, so 8-byte accesses go by half warps and 16-byte ones by quarters.
void count_shared(const std::uint64_t* addresses, std::size_t lanes, int bytes, bool new_request) {
  Counters& counters = Scheduler::current().counters();
  const auto together = static_cast<std::size_t>(std::min(banks, 128 / bytes));
  for (std::size_t first = 0; first < lanes; first += together) {
    counters.shared_wavefronts += wavefronts(addresses + first, std::min(together, lanes - first), bytes);
    ++counters.shared_wavefronts_ideal;
  }
  if (new_request) ++counters.shared_requests;
}

/// Lanes are served together by their numbers, whatever the order in which the schedule let them come.
void count(OpenAccesses::Instruction instruction) {
  std::sort(instruction.lanes.begin(), instruction.lanes.end());
  std::vector<std::uint64_t> addresses;
  for (const auto& [lane, address] : instruction.lanes) addresses.push_back(address);
  if (!instruction.global) return count_shared(addresses.data(), addresses.size(), instruction.bytes, true);
  std::set<std::uint64_t> sectors;
  for (const std::uint64_t address : addresses) {
    for (std::uint64_t at = address / sector; at <= (address + static_cast<std::uint64_t>(instruction.bytes) - 1) / sector;
         ++at) {
      sectors.insert(at);
    }
  }
  Counters& counters = Scheduler::current().counters();
  counters.global_sectors += sectors.size();
  ++counters.global_requests;
}

}  // namespace

void count_access(const void* place, std::uint64_t address, int bytes, bool global) {
  Thread& thread = Scheduler::current().running();
  auto& open = thread.warp->open_accesses.instructions;
  const auto key = std::make_tuple(thread.accesses.epoch, place, thread.accesses.visits[place]++);
  OpenAccesses::Instruction& instruction = open[key];
  instruction.bytes = bytes;
  instruction.global = global;
  instruction.lanes.emplace_back(thread.view.lane, address);
  if (instruction.lanes.size() < thread.warp->lanes.size()) return;
  count(instruction);
  open.erase(key);
}

void count_open_accesses(OpenAccesses& open) {
  for (const auto& [key, instruction] : open.instructions) count(instruction);
  open.instructions.clear();
}

void count_shared_wavefronts(const unsigned* addresses, int lanes, int bytes, bool new_request) {
  const std::vector<std::uint64_t> wide(addresses, addresses + lanes);
  count_shared(wide.data(), wide.size(), bytes, new_request);
}

}  // namespace flash_attention::emulator
