#pragma once

#include <algorithm>

#include "emulator/wrapper_case.h"
#include "jit/kernel_key.h"
#include "jit/nvrtc/nvrtc.h"
#include "jit/sources.h"

namespace flash_attention::testing {

/// A case compiled for a GPU.
inline jit::Nvrtc::Result compile_with_nvrtc(const WrapperCase& c, int arch) {
  std::vector<jit::SourceFile> headers;
  const auto add = [&](const std::string& name) {
    for (jit::SourceFile& file : jit::sources_of(name, {})) {
      const bool known =
          std::any_of(headers.begin(), headers.end(), [&](const auto& have) { return have.name == file.name; });
      if (!known) headers.push_back(std::move(file));
    }
  };
  add("abi/args.h");
  add("abi/config.h");
  for (const std::string& header : c.headers) add("ptx/" + header + ".cuh");
  return jit::Nvrtc::instance().compile(text_of(c), c.name + ".cu", headers,
                                        {"--gpu-architecture=" + jit::arch_name(arch), "-std=c++20", "-default-device"});
}

}  // namespace flash_attention::testing
