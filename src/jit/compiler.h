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
  std::string name;  // for people: "forward/portable sm_90a ForwardConfig{...}"
  std::string stem;  // the beginning of its file names: "forward_portable-sm_90a"
  std::string text;  // written by emit(); it includes the kernel
  int arch = 90;     // compute capability
  // emulator: also counts accesses without a ptx:: wrapper (runtime/plain_access.h)
  bool counts_plain_accesses = false;
};

/// The unit of a kernel, with the sources of the settings.
Unit unit_of(const KernelKey& key);

/// One compilation: everything that decides its product.
struct Job {
  Unit unit;
  std::vector<SourceFile> sources;  // all files that the unit includes, directly or indirectly
  std::vector<std::string> options;
  Recipe recipe;  // its name in the caches

  /// Fills in the recipe from all other fields. `identity`: the compiler and its version.
  void make_recipe(const std::string& kind, const std::string& identity);
};

/// Compiles units to machine code: NVRTC for a GPU, the host's compiler for the emulator. Can be used from several
/// threads.
class Compiler {
 public:
  /// Whose product is acceptable. Kernels made ahead of time may be from any compiler, and finding them needs no
  /// compiler.
  enum class Maker { anyone, this_compiler };

  virtual ~Compiler() = default;
  virtual Job prepare(const Unit& unit, Maker maker) const = 0;
  /// Throws Error(unavailable) if the compiler is missing, and compile_error.
  virtual Product compile(const Job& job) const = 0;
};

/// Returns a product: from the caches, or compiled and kept. All products are made here. quiet: a long compilation is
/// not logged.
Artifact build(const Compiler& compiler, const Unit& unit, bool quiet = false);

/// The same without kernels made ahead of time, for which this machine's driver may be too old.
Artifact build_here(const Compiler& compiler, const Unit& unit, bool quiet = false);

/// Only searches.
std::optional<Artifact> find_built(const Compiler& compiler, const Unit& unit);

/// The one form of a report: which compiler could not compile what, the path of the source, and the compiler's log.
Error compile_error(const std::string& compiler, const std::string& what, const std::string& source,
                    const std::string& log);

}  // namespace flash_attention::jit
