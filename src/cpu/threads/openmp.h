#pragma once

#include <cstdint>
#include <string>

#include "cpu/threads/thread_pool.h"

namespace flash_attention::cpu {

/// An OpenMP runtime that somebody else has loaded into this process, mostly torch: after each of its loops the runtime's
/// workers look for work for milliseconds, and a pool of our own would share the cores with them. Found by symbol in the
/// loaded libraries, so that nothing is linked: GOMP_parallel (GCC's runtime, and the others that offer its entries) or
/// __kmpc_fork_call (LLVM's and Intel's).
class OpenMp {
 public:
  /// The runtime to use, null if none is loaded. Libraries may come later (torch imported after us), so it looks again
  /// where some were loaded, at most every 0.1 s, and no more once it has seen torch's. Never gives one up.
  static const OpenMp* loaded();

  /// The runtime of one library, a handle of dlopen, or of the whole process (RTLD_DEFAULT); null where it has none. Kept
  /// for the life of the process.
  static const OpenMp* in(void* library);

  /// Forgets that another thread was looking; for the child of fork().
  static void after_fork();

  /// Of a loop that the calling thread begins: what torch.set_num_threads, omp_set_num_threads or OMP_NUM_THREADS say, and
  /// 1 inside of a parallel region.
  int threads() const;

  /// body(context, i) for each i in [0, count), on a team of so many threads, or as many as the runtime gives. False where
  /// the caller, all work being done, waited long for a thread of the team that had not even begun: others need the
  /// processors.
  bool run(std::int64_t count, Body body, void* context, int threads) const;

  /// The file that it comes from.
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
  int (*torch_threads_)() = nullptr;  // at::get_num_threads, which counts for threads that have not yet used OpenMP, too
  std::string library_;
  const OpenMp* kept_before_ = nullptr;  // a list of all there are: none is ever deleted, because loops may run on it

  friend class Search;
};

}  // namespace flash_attention::cpu
