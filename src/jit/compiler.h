#pragma once

#include <optional>
#include <string>
#include <vector>

#include "flash_attention/error.h"
#include "jit/kernel_key.h"
#include "jit/product.h"
#include "jit/sources.h"

namespace flash_attention::jit {

/// A translation unit for a compiler.
struct Unit {
  std::string name;                    // for people: "forward/portable sm_90a ForwardConfig{...}"
  std::string stem;                    // how its files begin: "forward_portable-sm_90a"
  std::string text;                    // what emit() wrote; it includes the kernel
  int arch = 90;                       // compute capability
  bool counts_plain_accesses = false;  // emulator: also those that no ptx:: wrapper makes (runtime/plain_access.h)
};

/// The unit of a kernel, as the sources of the settings have it.
Unit unit_of(const KernelKey& key);

/// One compilation: all that decides its product.
struct Job {
  Unit unit;
  std::vector<SourceFile> sources;  // what the unit includes, directly or not
  std::vector<std::string> options;
  Recipe recipe;  // its name in the caches

  /// Fills in the recipe from all else. `identity`: the compiler and its version.
  void make_recipe(const std::string& kind, const std::string& identity);
};

/// What makes machine code of a unit: NVRTC for a GPU, the host's compiler for the emulator. Safe from several threads.
class Compiler {
 public:
  /// Whose product will do: kernels made ahead of time are anyone's, and to find them no compiler need be here.
  enum class Maker { anyone, this_compiler };

  virtual ~Compiler() = default;
  virtual Job prepare(const Unit& unit, Maker maker) const = 0;
  /// Throws Error(unavailable) where the compiler is not here, and compile_error.
  virtual Product compile(const Job& job) const = 0;
};

/// The one way to a product: that of the caches, else the compiler's, which is kept. quiet: the log is not told how long it
/// takes.
Artifact build(const Compiler& compiler, const Unit& unit, bool quiet = false);

/// The same without what was made ahead of time, which this machine's driver may be too old for.
Artifact build_here(const Compiler& compiler, const Unit& unit, bool quiet = false);

/// Only looks.
std::optional<Artifact> find_built(const Compiler& compiler, const Unit& unit);

/// The one shape of a report: who could not compile what, where its source is, and the compiler's log.
Error compile_error(const std::string& compiler, const std::string& what, const std::string& source,
                    const std::string& log);

}  // namespace flash_attention::jit
