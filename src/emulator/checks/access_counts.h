#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <tuple>
#include <unordered_map>
#include <utility>
#include <vector>

namespace flash_attention::emulator {

/// How often a thread has been at each place of the code since it last met the other lanes.
struct AccessLog {
  std::uint64_t epoch = 0;
  std::unordered_map<const void*, std::uint32_t> visits;

  void next_epoch() {
    ++epoch;
    visits.clear();
  }
};

/// Accesses of single lanes, put together again into the instruction of a warp: the same place in the code, for the same
/// time since the lanes last met.
struct OpenAccesses {
  struct Instruction {
    int bytes = 0;
    bool global = false;
    std::vector<std::pair<unsigned, std::uint64_t>> lanes;  // with the address of each; in the order in which they came
  };
  std::map<std::tuple<std::uint64_t, const void*, std::uint32_t>, Instruction> instructions;
};

/// One lane's access; the passes or sectors are counted when all lanes have come.
void count_access(const void* place, std::uint64_t address, int bytes, bool global);

/// What is left when a block ends: instructions that only some lanes executed.
void count_open_accesses(OpenAccesses& open);

/// One warp instruction, or the next part of one.
void count_shared_wavefronts(const unsigned* addresses, int lanes, int bytes, bool new_request);

}  // namespace flash_attention::emulator
