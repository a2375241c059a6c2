#pragma once

#include <filesystem>
#include <string>
#include <vector>

#include "support/settings.h"

namespace flash_attention::jit {

/// A place where NVRTC may be: a library to open, and the reason to try it.
struct NvrtcPlace {
  std::string origin;             // "FLASH_ATTENTION_NVRTC", "Python wheel", ...
  std::filesystem::path library;  // a full path, or a name for the loader
  std::string missing;            // why there is nothing to open; empty if there is
};

/// The files around this process.
struct Surroundings {
  std::vector<std::filesystem::path> loaded_libraries;  // every shared object of the process
  std::filesystem::path executable;
  std::filesystem::path usr_local = "/usr/local";
};
Surroundings surroundings();

/// The places in the order in which they are tried: the environment variable (if set, no other); a library that the
/// process has already loaded; Python wheels; conda; CUDA_HOME; the loader; /usr/local/cuda*.
std::vector<NvrtcPlace> nvrtc_places(const support::Settings& settings, const Surroundings& around);

}  // namespace flash_attention::jit
