#pragma once

#include <future>
#include <memory>
#include <vector>

#include "jit/kernel_key.h"
#include "jit/product.h"
#include "jit/report.h"

namespace flash_attention::jit {

/// Machine code of one kernel, for the driver.
struct CompiledKernel {
  std::string image;  // a cubin for the exact architecture; PTX for a GPU that NVRTC does not know yet
  CompileReport report;
  std::filesystem::path path;  // its file; empty if it is not kept
  bool compiled = false;       // just now: no cache had it
  bool ahead_of_time = false;  // perhaps by another toolkit
};

/// Searches memory, the kernels made ahead of time and the disk cache; compiles if none has it. Throws
/// Error(unavailable) without NVRTC or with FLASH_ATTENTION_JIT off, and Error(compile_failed) with the compiler's log
/// and the source's path. `quiet`: no caller waits, so a long compilation is not logged.
std::shared_ptr<const CompiledKernel> compiled(const KernelKey& key, bool quiet = false);

/// The same for a kernel made ahead of time that the driver refuses: compiled here, and used from then on.
std::shared_ptr<const CompiledKernel> compiled_here(const KernelKey& key);

/// Only searches; null if the kernel would have to be compiled.
std::shared_ptr<const CompiledKernel> find_compiled(const KernelKey& key);

/// Calls compiled() for each key on a few background threads. The future is ready when all are done, and has the first
/// error. The destructor of its last copy waits.
std::shared_future<void> prewarm(std::vector<KernelKey> keys);

}  // namespace flash_attention::jit
