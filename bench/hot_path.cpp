// What a repeated call costs on the host besides the driver's own launch: forward() on a GPU whose driver is a stand-in
// that does nothing. Prints nanoseconds per call: the median of 31 batches of 10000 calls, and the fastest and slowest
// batch.
#include <stdlib.h>
#include <time.h>

#include <algorithm>
#include <cstdio>
#include <vector>

#include "fakes/fake_cuda.h"
#include "flash_attention/attention.h"

namespace {

using namespace flash_attention;

void* block(std::uintptr_t i) { return reinterpret_cast<void*>(i << 28); }

/// Processor time of this thread: nothing here waits, and other programs do not count.
double thread_nanoseconds() {
  timespec time{};
  ::clock_gettime(CLOCK_THREAD_CPUTIME_ID, &time);
  return 1e9 * static_cast<double>(time.tv_sec) + static_cast<double>(time.tv_nsec);
}

void measure(const char* name, const Problem& problem, std::string_view kernel) {
  const Options options{
      .device = {DeviceKind::cuda, 0, 0}, .stream = reinterpret_cast<void*>(testing::fake_stream_of(0)), .kernel = kernel};
  const Buffers buffers{.q = block(1), .k = block(2), .v = block(3), .out = block(4), .lse = static_cast<float*>(block(5))};
  forward(problem, buffers, options);

  constexpr int calls = 10000;
  std::vector<double> batches;
  for (int batch = 0; batch < 31; ++batch) {
    const double start = thread_nanoseconds();
    for (int i = 0; i < calls; ++i) forward(problem, buffers, options);
    batches.push_back((thread_nanoseconds() - start) / calls);
  }
  std::ranges::sort(batches);
  std::printf("%-40s %8.0f ns a call (%.0f to %.0f)\n", name, batches[batches.size() / 2], batches.front(), batches.back());
}

}  // namespace

int main() {
  ::setenv("FLASH_ATTENTION_DRIVER", testing::fake_cuda_path, 1);
  ::setenv("FLASH_ATTENTION_NVRTC", FLASH_ATTENTION_FAKES "/libfake_nvrtc_13.so", 1);
  ::setenv("FLASH_ATTENTION_CACHE_LIMIT", "0", 1);
  testing::fake_cuda().quiet = true;

  const Problem problem{.batch = 2,
                        .seq_q = 1024,
                        .seq_kv = 1024,
                        .heads_q = 16,
                        .heads_kv = 16,
                        .head_dim = 128,
                        .dtype = Dtype::bfloat16,
                        .causal = true};
  measure("forward/portable", problem, "forward/portable");
  measure("the planner's choice for sm_90", problem, "");
}
