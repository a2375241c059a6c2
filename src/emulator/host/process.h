#pragma once

#include <string>
#include <vector>

namespace flash_attention::emulator {

struct ProcessResult {
  int status = -1;     // exit status; -1 if it could not be started
  std::string output;  // stdout and stderr together
};

/// Runs a program (looked up in PATH) to its end. No shell.
ProcessResult run_process(const std::vector<std::string>& command);

int process_id();

}  // namespace flash_attention::emulator
