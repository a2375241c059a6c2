#pragma once

#include <algorithm>
#include <set>

#include "emulator/wrapper_case.h"
#include "jit/kernel_key.h"
#include "jit/nvrtc/nvrtc.h"
#include "jit/sources.h"

namespace flash_attention::testing {

/// A unit that includes these headers of ptx/, compiled for a GPU.
inline jit::Nvrtc::Result compile_with_nvrtc(const std::string& text, const std::string& name,
                                             const std::set<std::string>& included, int arch) {
  std::vector<jit::SourceFile> headers;
  const auto add = [&](const std::string& file_name) {
    for (jit::SourceFile& file : jit::sources_of(file_name, {})) {
      const bool known =
          std::any_of(headers.begin(), headers.end(), [&](const auto& have) { return have.name == file.name; });
      if (!known) headers.push_back(std::move(file));
    }
  };
  add("abi/args.h");
  add("abi/config.h");
  for (const std::string& header : included) add("ptx/" + header + ".cuh");
  return jit::Nvrtc::instance().compile(text, name + ".cu", headers,
                                        {"--gpu-architecture=" + jit::arch_name(arch), "-std=c++20", "-default-device"});
}

/// A case by itself.
inline jit::Nvrtc::Result compile_with_nvrtc(const WrapperCase& c, int arch) {
  return compile_with_nvrtc(text_of(c), c.name, {c.headers.begin(), c.headers.end()}, arch);
}

}  // namespace flash_attention::testing
