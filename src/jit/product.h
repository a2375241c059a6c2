#pragma once

#include <filesystem>
#include <string>

namespace flash_attention::jit {

/// The inputs of a compiled product. Two recipes with the same content, compiler and kind give the same product.
struct Recipe {
  std::string name;     // in words, for people: "forward/portable sm_90a ForwardConfig{...}"
  std::string stem;     // the beginning of its file names: "forward_portable-sm_90a"
  std::string kind;     // the ending of its file name: "cubin", "ptx", "so"
  std::string content;  // every input except the compiler itself: sources, options, architecture
  // the compiler and its version. Empty: there is no compiler here, so any compiler's product is acceptable
  std::string compiler;
};

/// The compiler's output.
struct Product {
  std::string payload;  // the machine code
  std::string source;   // the generated unit, kept next to it for readers
  std::string notes;    // the compiler's log
};

/// A product that is ready to use.
struct Artifact {
  std::string payload;
  std::string notes;
  // a file that begins with the payload (dlopen can load it); empty if no cache could keep it
  std::filesystem::path path;
  bool compiled = false;       // made just now, not found
  bool ahead_of_time = false;  // found among kernels made ahead of time
};

}  // namespace flash_attention::jit
