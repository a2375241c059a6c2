#pragma once

#include <string>
#include <vector>

namespace flash_attention::cli {

/// What a program printed, standard output and error together, and its exit code.
struct Finished {
  int code = 0;  ///< 127: it could not be started
  std::string output;
};

/// Runs a program of the PATH and waits for it.
Finished run_program(const std::vector<std::string>& words);

/// The path of a program in the PATH; empty if it is not there.
std::string find_program(const std::string& name);

/// This very program.
std::string own_path();

}  // namespace flash_attention::cli
