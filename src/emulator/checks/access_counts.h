#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <tuple>
#include <unordered_map>
#include <utility>
#include <vector>

namespace flash_attention::emulator {

/// How often a thread has been at each place of the code since the lanes of its warp last met.
struct AccessLog {
  std::uint64_t epoch = 0;
  std::unordered_map<const void*, std::uint32_t> visits;

  void next_epoch() {
    ++epoch;
    visits.clear();
  }
};

/// Combines accesses of single lanes to the instruction of a warp: the same place in the code, reached for the same
/// time since the lanes last met.
struct OpenAccesses {
  struct Instruction {
    int bytes = 0;
    bool global = false;
    std::vector<std::pair<unsigned, std::uint64_t>> lanes;  // with the address of each, in the order of arrival
  };
  std::map<std::tuple<std::uint64_t, const void*, std::uint32_t>, Instruction> instructions;
};

/// Records one lane's access. The passes or sectors are counted when all lanes have arrived.
void count_access(const void* place, std::uint64_t address, int bytes, bool global);

/// Counts the rest when a block ends: instructions that only some lanes executed.
void count_open_accesses(OpenAccesses& open);

/// One warp instruction, or the next part of one.
void count_shared_wavefronts(const unsigned* addresses, int lanes, int bytes, bool new_request);

}  // namespace flash_attention::emulator
