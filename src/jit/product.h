#pragma once

#include <filesystem>
#include <string>

namespace flash_attention::jit {

/// What a compiled product is made from. Two recipes with the same content, compiler and kind give the same product.
struct Recipe {
  std::string name;      // in words, for people: "forward/portable sm_90a ForwardConfig{...}"
  std::string stem;      // how its files begin: "forward_portable-sm_90a"
  std::string kind;      // how its file ends: "cubin", "ptx", "so"
  std::string content;   // every input of the compiler but itself: sources, options, architecture
  std::string compiler;  // which compiler, and its version. Empty: the compiler is not here, any one's product will do
};

/// What a compiler made of it.
struct Product {
  std::string payload;  // the machine code
  std::string source;   // the generated unit, kept next to it so that what ran can be read
  std::string notes;    // the compiler's log
};

/// A product at hand.
struct Artifact {
  std::string payload;
  std::string notes;
  std::filesystem::path path;  // a file that begins with the payload (dlopen takes it); empty where no cache could keep it
  bool compiled = false;       // made just now, not found
  bool ahead_of_time = false;  // found among kernels that were made elsewhere
};

}  // namespace flash_attention::jit
