#pragma once

#include <span>
#include <string_view>

namespace flash_attention::jit {

struct EmbeddedFile {
  std::string_view name;  // below kernels/, e.g. "tile/softmax.cuh"; src/emulator/runtime/ is under "emulator/"
  std::string_view text;
};

/// Every file of kernels/ and src/emulator/runtime/, from the time when the library was built.
std::span<const EmbeddedFile> embedded_files();

}  // namespace flash_attention::jit
