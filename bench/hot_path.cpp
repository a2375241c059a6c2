// What calls cost on the host. Of a repeated call all but the driver's own launch: forward() on a GPU whose driver is a
// stand-in that does nothing. Of a new problem its plan. Prints nanoseconds: the median of 31 batches of 10000 calls or
// 1000 plans, and the fastest and slowest batch.
#include <stdlib.h>
#include <time.h>

#include <algorithm>
#include <cstdio>
#include <vector>

#include "fakes/fake_cuda.h"
#include "flash_attention/planned_call.h"

namespace {

using namespace flash_attention;

void* block(std::uintptr_t i) { return reinterpret_cast<void*>(i << 28); }

/// Processor time of this thread: nothing here waits, and other programs do not count.
double thread_nanoseconds() {
  timespec time{};
  ::clock_gettime(CLOCK_THREAD_CPUTIME_ID, &time);
  return 1e9 * static_cast<double>(time.tv_sec) + static_cast<double>(time.tv_nsec);
}

// A mask program as flash_attention.flex records it: a window of 5 x 5 in an image, and documents.
constexpr char images[] = R"(t0 = tensor int64 1
s0 = scalar int
s1 = scalar int
v0 = mod i s0
v1 = floordiv i s0
v2 = mod j s0
v3 = floordiv j s0
v4 = lt v0 2
v5 = where v4 2 v0
v6 = gt v5 s1
v7 = where v6 s1 v5
v8 = lt v1 2
v9 = where v8 2 v1
v10 = gt v9 s1
v11 = where v10 s1 v9
v12 = sub v7 v2
v13 = abs v12
v14 = le v13 2
v15 = sub v11 v3
v16 = abs v15
v17 = le v16 2
v18 = and v14 v17
v19 = load t0 i
v20 = load t0 j
v21 = eq v19 v20
v22 = and v18 v21
visible = v22)";

template <class Call>
void measure_batches(const char* name, int calls, const char* unit, const Call& call) {
  std::vector<double> batches;
  for (int batch = 0; batch < 31; ++batch) {
    const double start = thread_nanoseconds();
    for (int i = 0; i < calls; ++i) call();
    batches.push_back((thread_nanoseconds() - start) / calls);
  }
  std::ranges::sort(batches);
  std::printf("%-32s %8.0f ns a %s (%.0f to %.0f)\n", name, batches[batches.size() / 2], unit, batches.front(),
              batches.back());
}

void measure_plan(const char* name, const Problem& problem, Pass pass, const DeviceInfo& device) {
  std::size_t launches = 0;
  measure_batches(name, 1000, "plan", [&] { launches += make_plan(problem, pass, device).launches.size(); });
}

void measure_plans(const Problem& problem) {
  const DeviceInfo h200 = typical_gpu(90), a100 = typical_gpu(80);
  const DeviceInfo cpu{.name = "CPU", .isa = CpuIsa::avx512, .threads = 16, .core_cache_bytes = 1 << 20};
  Problem decode = problem;
  decode.seq_q = 1, decode.seq_kv = 4096, decode.heads_kv = 4;
  decode.seqused_kv = true, decode.page_size = 64, decode.num_pages = 1024, decode.page_table_stride = 64;
  Problem packed = problem;
  packed.packed = true, packed.total_q = packed.total_kv = 1500;
  Problem program = problem;
  program.causal = false, program.program = images, program.program_sizes[0][0] = 1024;
  measure_plan("forward, sm_90", problem, Pass::forward, h200);
  measure_plan("backward, sm_90", problem, Pass::backward, h200);
  measure_plan("packed forward, sm_90", packed, Pass::forward, h200);
  measure_plan("packed backward, sm_90", packed, Pass::backward, h200);
  measure_plan("paged decode, sm_90", decode, Pass::forward, h200);
  measure_plan("paged decode, sm_80", decode, Pass::forward, a100);
  measure_plan("backward, sm_80", problem, Pass::backward, a100);
  measure_plan("mask program, forward, sm_90", program, Pass::forward, h200);
  measure_plan("paged decode, CPU", decode, Pass::forward, cpu);
}

void measure(const char* name, const Problem& problem, std::string_view kernel, Pass pass = Pass::forward) {
  Options options{
      .device = {DeviceKind::cuda, 0, 0}, .stream = reinterpret_cast<void*>(testing::fake_stream_of(0)), .kernel = kernel};
  const void* const captured[] = {block(11)};
  const double numbers[] = {32, 29};
  Buffers buffers{.q = block(1), .k = block(2), .v = block(3), .out = block(4), .lse = static_cast<float*>(block(5))};
  buffers.dout = block(6), buffers.dq = block(7), buffers.dk = block(8), buffers.dv = block(9);
  buffers.program_tensors = captured;
  buffers.program_scalars = numbers;
  const auto run = [&] {
    const PlannedCall call(problem, pass, options);  // as the Python binding does
    options.workspace_bytes = call.workspace_bytes();
    options.workspace = block(64);
    call.run(buffers, options);
  };
  run();

  measure_batches(name, 10000, "call", run);
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
  measure("its backward pass", problem, "", Pass::backward);
  Problem program = problem;
  program.causal = false;
  program.program = images;
  program.program_sizes[0][0] = 1024;
  measure("a mask program of 25 lines", program, "");
  measure("its backward pass", program, "", Pass::backward);
  measure_plans(problem);
}
