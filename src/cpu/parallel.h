#pragma once

#include <cstdint>

#include "cpu/thread_pool.h"

namespace flash_attention::cpu {

/// Threads that parallel_for uses: those of the caller's hook (set_parallel_for), else of the library's own pool.
int num_threads();

/// body(context, i) for each i in [0, count): on the caller's hook, the pool, or (serial) the calling thread. The first
/// exception of a body is thrown again after all have ended.
void parallel_for(std::int64_t count, bool serial, Body body, void* context);

}  // namespace flash_attention::cpu
