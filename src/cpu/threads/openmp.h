#pragma once

#include <cstdint>
#include <string>

#include "cpu/threads/thread_pool.h"

namespace flash_attention::cpu {

/// An OpenMP runtime that another library, mostly torch, has loaded into this process. After each of torch's loops the
/// runtime's workers look for work for milliseconds, and a pool of our own would compete with them for the cores. It is
/// found by symbol in the loaded libraries, so nothing is linked: GOMP_parallel (GCC's runtime, and others with its
/// entries) or __kmpc_fork_call (LLVM's and Intel's).
class OpenMp {
 public:
  /// The runtime to use, or null if none is loaded. Libraries may be loaded later (torch imported after us). So it
  /// looks again if some were, at most every 0.1 s, and no more once it has seen the runtime of torch. It never gives
  /// one up.
  static const OpenMp* loaded();

  /// The runtime of one library (a handle of dlopen) or of the whole process (RTLD_DEFAULT); null if it has none. It is
  /// kept for the life of the process.
  static const OpenMp* in(void* library);

  /// Forgets that another thread was looking; for the child of fork().
  static void after_fork();

  /// The threads of a loop that the calling thread begins: set by torch.set_num_threads, omp_set_num_threads or
  /// OMP_NUM_THREADS, and 1 inside of a parallel region.
  int threads() const;

  /// Calls body(context, i) for each i in [0, count), on a team of `threads` threads, or as many as the runtime gives.
  /// Returns false if the caller, with all work done, waited long for a thread of the team that had not even begun:
  /// then others need the processors.
  bool run(std::int64_t count, Body body, void* context, int threads) const;

  /// The file of the runtime.
  const std::string& library() const { return library_; }

 private:
  struct Team;

  OpenMp() = default;
  static const OpenMp* keep(const OpenMp& found);
  bool find_entries(void* library);
  void run_by_kmpc(Team& team) const;
  static void work(void* team);
  static void work_of_kmpc(std::int32_t* thread, std::int32_t* in_team, void* team);

  void (*gomp_parallel_)(void (*body)(void*), void* data, unsigned threads, unsigned flags) = nullptr;
  void (*kmpc_fork_call_)(void* where, std::int32_t arguments, void (*body)(std::int32_t*, std::int32_t*, void*),
                          ...) = nullptr;
  int (*max_threads_)() = nullptr;
  int (*thread_num_)() = nullptr;
  int (*in_parallel_)() = nullptr;
  // at::get_num_threads, which is also right for threads that have not used OpenMP yet
  int (*torch_threads_)() = nullptr;
  std::string library_;
  const OpenMp* kept_before_ = nullptr;  // a list of all runtimes: none is ever deleted, because loops may run on it

  friend class Search;
};

}  // namespace flash_attention::cpu
