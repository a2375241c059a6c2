#pragma once

#include <string>

#include "emulator/trace/timeline.h"

namespace flash_attention::cli {

/// One launch with the timeline of its first recorded cluster.
struct TracedLaunch {
  emulator::LaunchRecord record;
  emulator::Timeline timeline;
  emulator::Prediction prediction;
};

/// The trace as Perfetto and chrome://tracing read it: a process for each block, a thread for each warp, and one for each
/// unit of its SM.
std::string chrome_trace(const TracedLaunch& launch, const emulator::Machine& machine);

/// A page that needs nothing else: the same timeline to zoom and to drag, what the units did, and the machine's rates.
std::string trace_page(const std::string& title, const TracedLaunch& launch, const emulator::Machine& machine);

}  // namespace flash_attention::cli
