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
  std::string image;  // a cubin for the exact architecture; PTX for a GPU newer than NVRTC knows
  CompileReport report;
  std::filesystem::path path;  // where it is kept; empty where it is not
  bool compiled = false;       // just now: found in no cache
  bool ahead_of_time = false;  // elsewhere, by another toolkit perhaps
};

/// Looks in memory, among the kernels made ahead of time and in the disk cache; else compiles. Throws Error(unavailable)
/// without NVRTC or with FLASH_ATTENTION_JIT off, Error(compile_failed) with the compiler's log and the source's path.
/// `quiet`: no caller waits, and the log hears of no long compilation.
std::shared_ptr<const CompiledKernel> compiled(const KernelKey& key, bool quiet = false);

/// The same for a kernel made ahead of time that the driver does not take: compiled here, and so from then on.
std::shared_ptr<const CompiledKernel> compiled_here(const KernelKey& key);

/// Only looks; null where the kernel would have to be compiled.
std::shared_ptr<const CompiledKernel> find_compiled(const KernelKey& key);

/// compiled() for each key, by a few background threads. The future is ready when all are done and carries the first
/// error; its last copy waits when it goes.
std::shared_future<void> prewarm(std::vector<KernelKey> keys);

}  // namespace flash_attention::jit
