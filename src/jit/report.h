#pragma once

#include <string>
#include <string_view>
#include <vector>

namespace flash_attention::jit {

/// The assembler's report of the kernel (--ptxas-options=-v).
struct CompileReport {
  int registers = 0;
  int stack_bytes = 0;
  int spill_store_bytes = 0;
  int spill_load_bytes = 0;
  int shared_bytes = 0;  // static
  /// Warnings about wgmma that the assembler had to make slow: serialised, or with an additional wait or arrive.
  std::vector<std::string> wgmma_warnings;
};

CompileReport read_report(std::string_view log);

}  // namespace flash_attention::jit
