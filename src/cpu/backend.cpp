#include "cpu/backend.h"

#include <unistd.h>

#include <algorithm>
#include <fstream>
#include <new>
#include <optional>

#include "cpu/append.h"
#include "cpu/caches.h"
#include "cpu/detect.h"
#include "cpu/isa/tables.h"
#include "cpu/kernel_rows.h"
#include "cpu/key_bounds.h"
#include "cpu/program_code.h"
#include "cpu/region.h"
#include "cpu/tails.h"
#include "cpu/threads/parallel.h"
#include "flash_attention/error.h"
#include "launch/cpu_call.h"

namespace flash_attention::cpu {
namespace {

/// The processor's name from Linux; empty if it has none.
std::string model_name() {
  std::ifstream file("/proc/cpuinfo");
  for (std::string line; std::getline(file, line);) {
    if (line.starts_with("model name")) return line.substr(line.find(':') + 2);
  }
  return {};
}

/// The work of a call, in multiplications of a product at its peak: a million take about 25 us on a core with AVX-512.
double multiplications(const Problem& problem, Pass pass) {
  // A single row takes the time of four rows, and a few keys that of eight keys.
  const auto rows = static_cast<double>(std::max<std::int64_t>(problem.heads_q * problem.seq_q, 4 * problem.heads_kv));
  const std::int64_t listed = problem.key_list.entries * problem.key_list.block_kv;
  const std::int64_t seen = problem.key_list.kind == KeyListKind::none ? problem.seq_kv : listed;
  const auto keys = static_cast<double>(std::max<std::int64_t>(seen, 8));
  const double scores = static_cast<double>(problem.batch) * rows * keys;
  double products = 1;  // two
  if (pass == Pass::backward || pass == Pass::standard_backward) products = 2.5;
  if (pass == Pass::tangent) products = 3;
  if (pass == Pass::second) products = 8;
  return products * scores * static_cast<double>(problem.head_dim + problem.head_dim_v);
}

/// Tile buffers of one thread, allocated at its first item and kept until it ends. A call may be later still, from the
/// destructor of another of the thread's variables: such a call frees its buffers itself.
class Scratch {
 public:
  static void* of_thread(std::size_t bytes) {
    thread_local const Owner owner;
    if (size_ < bytes) {
      void* memory = ::operator new (bytes, std::align_val_t{64}, std::nothrow);
      if (memory == nullptr) throw Error(ErrorCode::out_of_memory, "no memory for the tile buffers of a thread");
      give_back();
      memory_ = memory;
      size_ = bytes;
    }
    return memory_;  // NOLINT(clang-analyzer-cplusplus.NewDelete): it does not know thread_local
  }

  static void end_of_call() {
    if (orphaned_) give_back();
  }

 private:
  struct Owner {
    ~Owner() {
      give_back();
      orphaned_ = true;
    }
  };

  static void give_back() {
    ::operator delete (memory_, std::align_val_t{64});
    memory_ = nullptr;
    size_ = 0;
  }

  static inline thread_local void* memory_ = nullptr;
  static inline thread_local std::size_t size_ = 0;
  static inline thread_local bool orphaned_ = false;
};

/// The steps of a kernel, the memory that each thread needs for them, and the rows of a block.
struct Steps {
  const Step* first;
  std::size_t scratch_bytes;
  int block_q;
};

class CpuKernel final : public Kernel {
 public:
  CpuKernel(Steps steps, Steps steps_in_bfloat16, const Problem& problem, Pass pass, const ProgramRunner& runner)
      : steps_(steps), steps_in_bfloat16_(steps_in_bfloat16) {
    if (!problem.program.empty()) program_.emplace(problem, pass, runner);
  }

  void launch(const Problem& problem, const Plan& plan, const Buffers& buffers, const Options& options) const override {
    struct Loop {
      const Call& call;
      const Step& step;
      std::size_t scratch_bytes;
    };
    const Steps& steps = problem.dtype == Dtype::bfloat16 ? steps_in_bfloat16_ : steps_;
    Call call = make_call(problem, plan, steps.block_q, buffers, options);
    std::optional<ProgramCall> program;
    if (program_) {
      program.emplace(*program_, buffers, region<char>(call, plan::CpuRegion::program_gradients));
      call.program = program->view();
    }
    const bool gradients = plan.pass == Pass::backward || plan.pass == Pass::standard_backward || plan.pass == Pass::second;
    clear_tails(call, gradients);
    find_key_bounds(call);
    const Sharing sharing(multiplications(problem, plan.pass));
    for (const Step* step = steps.first; step->count != nullptr; ++step) {
      Loop loop{call, *step, steps.scratch_bytes};
      parallel_for(
          step->count(call), !sharing.is_worth_it(),
          [](void* context, std::int64_t item) {
            const Loop& one = *static_cast<const Loop*>(context);
            one.step.run(one.call, item, Scratch::of_thread(one.scratch_bytes));
          },
          &loop);
    }
    Scratch::end_of_call();
  }

 private:
  Steps steps_, steps_in_bfloat16_;
  std::optional<CompiledProgram> program_;
};

Steps steps_of(const KernelTable& table, const KernelRow& row) {
  return {row.steps(table), table.scratch_bytes, table.block_q};
}

}  // namespace

const KernelTable& kernel_table(CpuIsa isa) {
  if (!has_isa(isa)) {
    throw Error(ErrorCode::unavailable, "this CPU has no " + std::string(to_string(isa)) +
                                            "; its best instruction set is " + std::string(to_string(best_isa())));
  }
  switch (isa) {
#if defined(__x86_64__) && !defined(FLASH_ATTENTION_GENERIC_CPU)  // cmake/cpu_isa.cmake
    case CpuIsa::amx:
    case CpuIsa::avx512_bf16:
    case CpuIsa::avx512:
      return avx512_table;
    case CpuIsa::avx2:
      return avx2_table;
#elif defined(__aarch64__)
    case CpuIsa::neon:
      return neon_table;
#endif
    default:
      return generic_table;
  }
}

DeviceInfo info() {
  DeviceInfo info;
  info.device = {.kind = DeviceKind::cpu};
  info.name = model_name();
  if (info.name.empty()) info.name = "CPU";
  info.isa = chosen_isa();
  kernel_table(info.isa);  // refuses a requested instruction set that this CPU does not have
  info.threads = num_threads();
  info.l2_bytes = caches().last;
  info.core_cache_bytes = caches().core;
  info.memory_bytes = static_cast<std::int64_t>(sysconf(_SC_PHYS_PAGES)) * sysconf(_SC_PAGE_SIZE);
  return info;
}

std::unique_ptr<Kernel> load_kernel(const Problem& problem, const Plan& plan, const DeviceInfo& device) {
  const KernelRow& row = row_of(plan);
  const KernelTable& table = kernel_table(device.isa);
  const Steps steps = steps_of(table, row);
#if defined(__x86_64__) && !defined(FLASH_ATTENTION_GENERIC_CPU)
  if (row.multiplies_bfloat16 && (device.isa == CpuIsa::amx || device.isa == CpuIsa::avx512_bf16)) {
    const Steps special = steps_of(device.isa == CpuIsa::amx ? amx_table : avx512_bf16_table, row);
    if (special.first->count != nullptr)
      return std::make_unique<CpuKernel>(steps, special, problem, plan.pass, table.program);
  }
#endif
  return std::make_unique<CpuKernel>(steps, steps, problem, plan.pass, table.program);
}

namespace {

std::vector<Finding> diagnose() {
  const DeviceInfo device = info();
  return {{.subject = "CPU",
           .ok = true,
           .detail = device.name + ", " + std::string(to_string(device.isa)) + ", " + describe_threads(),
           .advice = ""}};
}

}  // namespace

constinit const Backend backend{
    .kind = DeviceKind::cpu,
    .name = "cpu",
    .traits = {.host_memory = true},
    .info =
        [](const Device& device) {
          if (device.index == 0) return info();
          throw Error(ErrorCode::invalid_argument,
                      "device.index: got " + std::to_string(device.index) + "; there is one CPU, cpu:0");
        },
    .describe = [](const Device&) { return std::string("cpu"); },
    .devices = [] { return std::vector{info()}; },
    .diagnose = diagnose,
    .threads = num_threads,
    .load = [](const Problem& problem, const Plan& plan, const DeviceInfo& device,
               void*) { return load_kernel(problem, plan, device); },
    .append = append,
    .append_backward = append_backward,
};

}  // namespace flash_attention::cpu
