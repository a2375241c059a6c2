#include "emulator/checks/access_counts.h"

#include <algorithm>
#include <vector>

#include "emulator/checks/counting.h"
#include "emulator/machine/scheduler.h"

namespace flash_attention::emulator {
namespace {

constexpr int banks = 32;  // of 4 bytes
constexpr std::uint64_t sector = 32;

/// The different units of this many bytes that the lanes touch. It is a vector, because every emulated access runs
/// through here.
std::vector<std::uint64_t> touched(const std::uint64_t* addresses, std::size_t lanes, int bytes, std::uint64_t unit) {
  std::vector<std::uint64_t> units;
  units.reserve(lanes * (static_cast<std::size_t>(bytes) / unit + 2));
  for (std::size_t lane = 0; lane < lanes; ++lane) {
    const std::uint64_t last = (addresses[lane] + static_cast<std::uint64_t>(bytes) - 1) / unit;
    for (std::uint64_t at = addresses[lane] / unit; at <= last; ++at) units.push_back(at);
  }
  std::sort(units.begin(), units.end());
  units.erase(std::unique(units.begin(), units.end()), units.end());
  return units;
}

/// Passes for lanes that are served together: the largest number of different words in one bank.
std::uint64_t wavefronts(const std::uint64_t* addresses, std::size_t lanes, int bytes) {
  std::uint64_t words_of_bank[banks] = {}, most = 0;
  for (const std::uint64_t word : touched(addresses, lanes, bytes, 4)) {
    most = std::max(most, ++words_of_bank[word % banks]);
  }
  return most;
}

/// A pass moves 128 bytes, so 8-byte accesses are served by half warps and 16-byte accesses by quarter warps.
void count_shared(const std::uint64_t* addresses, std::size_t lanes, int bytes, bool new_request) {
  Counters& counters = Scheduler::current().counters();
  const auto together = static_cast<std::size_t>(std::min(banks, 128 / bytes));
  for (std::size_t first = 0; first < lanes; first += together) {
    counters.shared_wavefronts += wavefronts(addresses + first, std::min(together, lanes - first), bytes);
    ++counters.shared_wavefronts_ideal;
  }
  if (new_request) ++counters.shared_requests;
}

/// Lanes are served together by their numbers, whatever the order in which the schedule runs them.
void count(OpenAccesses::Instruction instruction) {
  std::sort(instruction.lanes.begin(), instruction.lanes.end());
  std::vector<std::uint64_t> addresses;
  for (const auto& [lane, address] : instruction.lanes) addresses.push_back(address);
  if (!instruction.global) return count_shared(addresses.data(), addresses.size(), instruction.bytes, true);
  Counters& counters = Scheduler::current().counters();
  counters.global_sectors += touched(addresses.data(), addresses.size(), instruction.bytes, sector).size();
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
  if (!counting_accesses()) return;
  const std::vector<std::uint64_t> wide(addresses, addresses + lanes);
  count_shared(wide.data(), wide.size(), bytes, new_request);
}

}  // namespace flash_attention::emulator
