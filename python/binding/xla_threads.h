#pragma once

// The CPU backend on the threads of XLA, which runs the call: the library starts no pool in addition.

#include <xla/ffi/api/ffi.h>

#include <algorithm>
#include <atomic>
#include <memory>

#include "flash_attention/runtime.h"

namespace flash_attention::python {

/// While it lives, loops of this thread run on XLA's thread pool, and on this thread.
class XlaThreads {
 public:
  explicit XlaThreads(xla::ffi::ThreadPool pool)
      : pool_(pool), scope_(run, this, static_cast<int>(std::max<std::int64_t>(pool.num_threads(), 0))) {}

 private:
  /// The state of one loop, shared with its tasks: a task that XLA starts after the loop's end finds no index left.
  struct Loop {
    std::int64_t count = 0;
    void (*body)(void* context, std::int64_t index) = nullptr;
    void* context = nullptr;
    std::atomic<std::int64_t> next{0}, done{0};

    void help() {
      for (std::int64_t i = next++; i < count; i = next++) {
        body(context, i);
        if (++done == count) done.notify_all();
      }
    }
  };

  /// The caller waits for indices that have been begun, never for a task to start: it may itself be a thread of the pool.
  static void run(void* self, std::int64_t count, void (*body)(void*, std::int64_t), void* context) {
    xla::ffi::ThreadPool& pool = static_cast<XlaThreads*>(self)->pool_;
    const auto loop = std::make_shared<Loop>();
    loop->count = count;
    loop->body = body;
    loop->context = context;
    const std::int64_t helpers = std::min(count, pool.num_threads()) - 1;
    for (std::int64_t i = 0; i < helpers; ++i) pool.Schedule([loop] { loop->help(); });
    loop->help();
    for (std::int64_t done = loop->done; done < count; done = loop->done) loop->done.wait(done);
  }

  xla::ffi::ThreadPool pool_;
  ParallelScope scope_;
};

}  // namespace flash_attention::python
