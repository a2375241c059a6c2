// An OpenMP runtime with LLVM's entry and without GCC's: each parallel region starts new threads, all but the first after a
// delay.

#include <chrono>
#include <cstdarg>
#include <cstdint>
#include <thread>
#include <vector>

namespace {

int max_threads = 3;
std::chrono::milliseconds delay{0};
thread_local int number = 0, depth = 0;

}  // namespace

extern "C" {

int omp_get_max_threads() { return max_threads; }
int omp_get_thread_num() { return number; }
int omp_in_parallel() { return depth > 0 ? 1 : 0; }
void omp_set_num_threads(int threads) { max_threads = threads; }
void fake_set_delay(int milliseconds) { delay = std::chrono::milliseconds(milliseconds); }

void __kmpc_fork_call(void* /*where*/, std::int32_t arguments, void (*body)(std::int32_t*, std::int32_t*, void*), ...) {
  std::va_list list;
  va_start(list, body);
  void* argument = arguments > 0 ? va_arg(list, void*) : nullptr;
  va_end(list);
  std::vector<std::thread> threads;
  for (int i = 0; i < max_threads; ++i) {
    threads.emplace_back([=] {
      number = i, depth = 1;
      if (i > 0) std::this_thread::sleep_for(delay);
      std::int32_t id = i;
      body(&id, &id, argument);
    });
  }
  for (std::thread& thread : threads) thread.join();
}
}
