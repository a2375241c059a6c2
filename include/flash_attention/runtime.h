#pragma once

#include <cstdint>
#include <future>
#include <string>
#include <string_view>
#include <vector>

#include "flash_attention/append.h"
#include "flash_attention/attention.h"
#include "flash_attention/export.h"

/// The process around the calls: messages, threads, the kernel cache, diagnosis.
namespace flash_attention {

/// Receives the library's messages (a long compile, a repaired cache file). The library itself never prints.
using LogCallback = void (*)(std::string_view message, void* context);
FLASH_ATTENTION_API void set_log_callback(LogCallback callback, void* context);

/// Lets an engine run the CPU backend on its own threads. It must call body(body_context, i) once for each i in [0,
/// count) and return when all calls are done. nullptr restores the default: the OpenMP team of the process, or a pool
/// of the library (docs/cpu.md).
using ParallelFor = void (*)(void* context, std::int64_t count, void (*body)(void* body_context, std::int64_t index),
                             void* body_context);
FLASH_ATTENTION_API void set_parallel_for(ParallelFor parallel_for, void* context, int threads);

/// The same for the calls of this thread during this object's life, with precedence over set_parallel_for: for an
/// engine that names its threads with each call. It has no effect if `threads` is 0, or if
/// FLASH_ATTENTION_THREAD_SOURCE names other threads. FLASH_ATTENTION_THREADS is an upper bound.
class FLASH_ATTENTION_API ParallelScope {
 public:
  ParallelScope(ParallelFor parallel_for, void* context, int threads);
  ~ParallelScope();
  ParallelScope(const ParallelScope&) = delete;
  ParallelScope& operator=(const ParallelScope&) = delete;

  ParallelFor parallel_for;
  void* context;
  int threads;

 private:
  const ParallelScope* outer_;
};

/// Compiles and loads everything that the call would need, so that the call itself never waits for a compiler.
FLASH_ATTENTION_API void prewarm(const Problem& problem, Pass pass, const Options& options);

/// The same on a separate thread. A call that is made earlier waits for it. get() throws what prewarm would throw; the
/// destructor of the future waits.
FLASH_ATTENTION_API std::future<void> prewarm_in_background(const Problem& problem, Pass pass, const Options& options);

/// A compiled GPU kernel.
struct KernelReport {
  std::string kernel;  ///< unit, architecture and configuration, in words
  int registers = 0;   ///< of a thread
  int spill_bytes = 0;
  std::string path;       ///< its file; empty if it is not kept
  bool compiled = false;  ///< just now: no cache had it
};

/// Compiles the launches of a plan for a GPU into the cache on disk. Needs NVRTC and no GPU. `arch` is the compute
/// capability, 90 for 9.0. Throws Error(unavailable | compile_failed).
FLASH_ATTENTION_API std::vector<KernelReport> compile(const Plan& plan, int arch);
FLASH_ATTENTION_API std::vector<KernelReport> compile(const AppendProblem& problem, int arch);

/// One check of `doctor`.
struct Finding {
  std::string subject;  ///< "NVRTC", "driver", "CPU", ...
  bool ok = false;
  std::string detail;  ///< what was found, or what was tried and missing
  std::string advice;  ///< the next step if it is not ok
};
FLASH_ATTENTION_API std::vector<Finding> diagnose();

/// The kernels for a usual problem (bfloat16, head_dim 128, causal) on a GPU, and whether the library has been
/// measured, emulated or only compiled for its architecture. No such GPU is needed: typical_gpu.
FLASH_ATTENTION_API std::string describe_path(const DeviceInfo& gpu);

/// One file of the kernel cache on disk.
struct CacheEntry {
  std::string path;
  std::string kernel;  ///< unit, architecture and configuration, in words
  std::int64_t bytes = 0;
  bool intact = false;  ///< header and payload hash agree
};
FLASH_ATTENTION_API std::string cache_directory();
FLASH_ATTENTION_API std::vector<CacheEntry> cache_entries();
FLASH_ATTENTION_API std::int64_t clear_cache();  ///< removes every entry; returns the bytes freed

}  // namespace flash_attention
