#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <set>
#include <string>
#include <vector>

#include "abi/args.h"
#include "emulator/machine/scheduler.h"
#include "launch/tensor_maps.h"

namespace flash_attention::testing {

using Bytes = std::vector<unsigned char>;

template <typename T>
Bytes bytes_of(const std::vector<T>& values) {
  Bytes bytes(values.size() * sizeof(T));
  if (!bytes.empty()) std::memcpy(bytes.data(), values.data(), bytes.size());
  return bytes;
}

/// A kernel that uses one wrapper of kernels/ptx, and what it must write, computed here by the instruction's definition.
/// The same case runs in the emulator and on a GPU; the bits must agree.
struct WrapperCase {
  std::string name;
  std::vector<std::string> headers;  // below ptx/
  std::string storage{};             // members of the block's shared memory; may be empty
  std::string body;                  // of the kernel; `input` and `output` point to bytes
  int arch = 80;                     // the first that has the instruction
  emulator::LaunchShape shape{};     // shared_bytes is filled in
  Bytes input{};
  Bytes expected{};
  Bytes before{};  // what output holds at first; zeros where empty
  struct Map {
    bool of_output = false;
    launch::TensorMapSpec spec{};  // data is an offset into input or output
  };
  std::vector<Map> maps{};
  double tolerance = 0;  // relative, of floats; 0: the same bits
};

/// Whether a GPU has a case's instructions: sm_100 has tensor memory in place of wgmma.
inline bool has_instructions(int arch, const WrapperCase& c) {
  return c.arch >= 100 ? arch == 100 || arch == 103 : c.arch == 90 ? arch == 90 : c.arch <= arch;
}

/// The parameter of every test kernel. Where several cases are one unit, `which` says whose kernel runs.
struct WrapperArgs {
  abi::TensorMap maps[4];
  const unsigned char* input;
  unsigned char* output;
  int which = 0;
};

/// What comes before the kernels of some cases.
inline std::string opening_of(const std::set<std::string>& headers) {
  std::string text = "#include \"abi/args.h\"\n#include \"abi/config.h\"\n";
  for (const std::string& header : headers) text += "#include \"ptx/" + header + ".cuh\"\n";
  return text +
         "using namespace flash_attention;\nusing abi::Type;\n"
         "struct Args { abi::TensorMap maps[4]; const unsigned char* input; unsigned char* output; int which; };\n";
}

inline std::string kernel_of(const WrapperCase& c) {
  std::string text;
  if (!c.storage.empty()) text += "struct SharedStorage {\n" + c.storage + "\n};\n";
  text += "extern \"C\" __global__ void kernel(const __grid_constant__ Args args) {\n";
  text +=
      "  [[maybe_unused]] const unsigned char* input = args.input;\n  [[maybe_unused]] unsigned char* output = "
      "args.output;\n";
  text += "  [[maybe_unused]] const int thread = threadIdx.x;\n";
  if (!c.storage.empty()) text += "  auto& shared = ptx::shared_storage<SharedStorage>();\n";
  return text + c.body + "\n}\n";
}

/// The kernel in a namespace named after the case, so that one unit can hold those of many.
inline std::string kernel_in_namespace(const WrapperCase& c) {
  std::string kernel = kernel_of(c);
  const std::string linkage = "extern \"C\" ";
  kernel.erase(kernel.find(linkage), linkage.size());
  return "namespace case_" + c.name + " {\n" + kernel + "}\n";
}

inline std::string text_of(const WrapperCase& c) { return opening_of({c.headers.begin(), c.headers.end()}) + kernel_of(c); }

/// The list of all of them, put together in wrapper_cases.h.
using WrapperCases = std::vector<WrapperCase>;

inline void PrintTo(const WrapperCase& c, std::ostream* out) { *out << c.name; }

}  // namespace flash_attention::testing
