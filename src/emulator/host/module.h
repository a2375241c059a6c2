#pragma once

#include <memory>
#include <string>

#include "emulator/machine/scheduler.h"
#include "jit/compiler.h"

namespace flash_attention::emulator {

/// A unit that is loaded into this process. It is never unloaded.
struct Module {
  std::string name;
  EntryPoints entry;
};

/// Loads a unit, and compiles it if needed. Loaded once in a process.
std::shared_ptr<const Module> load_module(const jit::Unit& unit);

/// How a grid is run.
struct RunOptions {
  std::uint64_t seed = 0;
  int workers = 0;  // OS threads; 0: one for each core
  std::string unit{};  // the file of the kernel, for records
};

/// Runs every block of the grid. `argument` is the kernel's parameter. Throws Error(device_failed) with the kernel,
/// block, thread and instruction of the first mistake found.
void run_grid(const Module& module, const LaunchShape& shape, const void* argument, const RunOptions& options = {});

}  // namespace flash_attention::emulator
