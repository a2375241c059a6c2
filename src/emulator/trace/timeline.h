#pragma once

#include <array>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "emulator/trace/record.h"

namespace flash_attention::emulator {

/// The units of an SM that work is laid out on, and what all SMs share.
enum class Unit : int { tensor, special, fma, issue, shared, l2 };
constexpr int num_units = 6;
const char* to_string(Unit unit);

/// A number of the machine, and where it is from.
struct Rate {
  const char* name;
  double value;
  const char* unit;
  const char* source;
};

/// What a GPU does in a clock. Every number is from a document or a measurement of something else than our kernels.
struct Machine {
  const char* name = "";
  double clock_ghz = 0;
  int num_sms = 0;
  double wgmma_flops = 0;      ///< per clock and SM, 16-bit operands
  double mma_flops = 0;        ///< mma.sync
  double special = 0;          ///< lanes per clock and SM
  double fma = 0;              ///< lanes
  double issue = 0;            ///< warp instructions
  double shared_bytes = 0;     ///< per clock and SM
  double l2_bytes = 0;         ///< per clock, to one SM
  double l2_bytes_of_all = 0;  ///< per clock, to all SMs
  double memory_bytes_s = 0;   ///< of the GPU
  double matrix_flops_s = 0;   ///< that a long matrix product reaches: the power limit is in it
  double load_latency = 0;     ///< clocks: ld.global and cp.async, from L2
  double bulk_latency = 0;     ///< of a TMA box, until its mbarrier completes
  double wgmma_latency = 0;    ///< from the end of a product to the next instruction of a waiting warp
  double barrier_latency = 0;  ///< from the last arrival to the next instruction of a waiting warp
  double mbarrier_latency = 0;
  double launch_s = 0;  ///< of an empty kernel

  /// The same, for people.
  std::vector<Rate> rates() const;
};

/// sm_80: an A100; sm_90: an H200. With fewer SMs than it has (0: all), these have their share of what all SMs share.
/// Throws Error(unavailable) for another architecture.
Machine machine_of(int arch, int num_sms = 0);

/// What a warp does from one time to another, in clocks from the start of the block.
struct Span {
  int block = 0;  ///< of those that share the SM, or of the cluster
  int warp = 0;
  double begin = 0, end = 0;
  bool waits = false;
  std::string what;
};

/// What a unit does.
struct UnitSpan {
  int sm = 0;
  Unit unit{};
  double begin = 0, end = 0;
  std::string what;
};

/// The recorded blocks of a launch, laid out in time.
struct Timeline {
  double clocks = 0;                     ///< until the last warp has ended
  std::array<double, num_units> busy{};  ///< clocks of each unit, of those of an SM
  double waiting = 0;                    ///< share of the warps' time that they wait
  Unit critical = Unit::tensor;          ///< the unit that is busy longest
  std::vector<Span> warps;
  std::vector<UnitSpan> units;
};

/// With how many others a cluster runs.
struct Share {
  int resident = 1;  ///< clusters on an SM: those that the grid has, at most those that the plan counts with
  int busy_sms = 1;  ///< that have work of the launch
};
Share share_of(const LaunchRecord& launch, const Machine& machine);

/// One cluster, laid out beside others like it. `keeps_spans` false: the sums alone. Throws Error(internal) if the record
/// cannot be laid out: an event waits for one that nobody makes.
Timeline lay_out(std::span<const BlockRecord> cluster, const Machine& machine, const Share& share, bool keeps_spans = true);

/// How long a launch takes.
struct Prediction {
  std::string unit;
  double seconds = 0;
  double block_clocks = 0;  ///< the mean of the recorded clusters
  int resident = 1;         ///< blocks that share an SM
  std::string bound;        ///< what decides: a unit, "latency", "power" or "memory"
};

/// The prediction for one launch; its recorded clusters are representative of all.
Prediction predict(const LaunchRecord& launch, const Machine& machine);

}  // namespace flash_attention::emulator
