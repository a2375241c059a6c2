#pragma once

#include <map>
#include <set>
#include <utility>

#include "emulator/emulate.h"
#include "flash_attention/error.h"

namespace flash_attention::testing {

/// Cases that are compiled as one unit for each architecture: a sixth of the time that they take one after another.
class Together {
 public:
  explicit Together(WrapperCases cases) : cases_(std::move(cases)) {}

  /// The output of the case of that name. Throws what the emulator throws.
  Bytes run(const std::string& name, std::uint64_t seed) {
    std::size_t which = 0;
    while (cases_.at(which).name != name) ++which;
    const WrapperCase& c = cases_[which];
    const auto [place, is_new] = modules_.try_emplace(c.arch);
    if (is_new) place->second = compile(c.arch);
    if (place->second == nullptr) return emulate(c, seed);  // each alone says which it is that does not compile
    return emulate(*place->second, static_cast<int>(which), c, seed);
  }

 private:
  std::shared_ptr<const emulator::Module> compile(int arch) const {
    std::set<std::string> headers;
    std::string kernels, choice;
    for (std::size_t which = 0; which < cases_.size(); ++which) {
      const WrapperCase& c = cases_[which];
      if (c.arch != arch) continue;
      headers.insert(c.headers.begin(), c.headers.end());
      kernels += kernel_in_namespace(c);
      choice += "  if (args.which == " + std::to_string(which) + ") case_" + c.name + "::kernel(args);\n";
    }
    const std::string last = "extern \"C\" __global__ void kernel(const __grid_constant__ Args args) {\n" + choice + "}\n";
    try {
      return emulator::load_module({"several cases", "test_together", opening_of(headers) + kernels + last, arch});
    } catch (const Error&) {
      return nullptr;
    }
  }

  WrapperCases cases_;
  std::map<int, std::shared_ptr<const emulator::Module>> modules_;
};

}  // namespace flash_attention::testing
