#pragma once

#include <cstdint>
#include <string>

#include "cpu/threads/thread_pool.h"

namespace flash_attention::cpu {

/// The number of threads that a loop of this thread would use now: those of the caller's hook (set_parallel_for),
/// otherwise of an OpenMP team (openmp.h), otherwise of the library's own pool. It is asked for each call, since
/// torch.set_num_threads may have changed it.
int num_threads();

/// How many, and whose, in words.
std::string describe_threads();

/// Whether a call with this many multiplications should use other threads: always if it takes about 25 us; on an OpenMP
/// team if it takes 8 us; and if it takes 3 us and begins so soon after this thread's last call that the workers are
/// awake. (The caller waits for no worker to wake. If they sleep, only the call that wakes them is lost.) Lives as long
/// as the call.
class Sharing {
 public:
  explicit Sharing(double multiplications);
  ~Sharing();
  Sharing(const Sharing&) = delete;
  Sharing& operator=(const Sharing&) = delete;
  bool is_worth_it() const { return worth_it_; }

 private:
  bool timed_, worth_it_;
};

/// Calls body(context, i) for each i in [0, count): on those threads, or (serial) on the calling thread. The first
/// exception of a body is thrown again after all have ended.
void parallel_for(std::int64_t count, bool serial, Body body, void* context);

}  // namespace flash_attention::cpu
