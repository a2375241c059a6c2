#include "cli/measure/measure.h"

#include <algorithm>
#include <chrono>
#include <optional>

#include "cli/measure/array.h"
#include "cli/measure/gpu_clock.h"
#include "cli/measure/memory_meter.h"
#include "cli/output/terminal.h"
#include "cli/problem/mask_flag.h"
#include "cpu/peaks.h"

namespace flash_attention::cli {
namespace {

double cpu_seconds(const Workload& work, Pass pass) {
  const auto start = std::chrono::steady_clock::now();
  call(work, pass);
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
}

/// A plain loop over K and V as yardstick. Both it and the call that is measured find them in memory and not in caches, as
/// a model does that has read its other layers in between.
class PlainRead {
 public:
  PlainRead(const Workload& work, const DeviceInfo& device)
      : work_(work), others_(std::min(static_cast<std::size_t>(2 * device.l2_bytes / 4096 * 4096), max_bytes), 1) {}

  double seconds() const {
    empty_caches();
    return read(work_.k.host(), work_.k.bytes()) + read(work_.v.host(), work_.v.bytes());
  }
  void empty_caches() const { read(others_.data(), others_.size()); }

 private:
  static constexpr std::size_t max_bytes = 256 << 20;  // some machines show the cache of all their neighbours, too

  static double read(const void* from, std::size_t bytes) {
    return cpu::read_seconds(from, static_cast<std::int64_t>(bytes / 4096 * 4096));
  }

  const Workload& work_;
  std::vector<char> others_;
};

void time_calls(const Workload& work, const MeasureLimits& limits, Measurement& result) {
  const Device device = work.options.device;
  const DeviceTraits& traits = device_traits(device);
  if (limits.max_samples == 0 || traits.emulated) return;
  std::optional<GpuClock> gpu;
  if (traits.streams) gpu.emplace(device_info(device));
  std::optional<PlainRead> plain;
  if (!traits.gpu_kernels && is_decoding(work.problem)) plain.emplace(work, device_info(device));
  std::vector<double> samples, ratios;
  double total = 0;
  const auto enough = [&] {
    return total >= limits.seconds && (static_cast<int>(samples.size()) >= limits.min_samples || total >= 3);
  };
  while (static_cast<int>(samples.size()) < limits.max_samples && !enough() && !interrupted()) {
    const double plain_s = plain ? plain->seconds() : 0;
    if (plain) plain->empty_caches();
    samples.push_back(gpu ? gpu->seconds(work.options.stream, [&] { call(work, result.pass); })
                          : cpu_seconds(work, result.pass));
    ratios.push_back(plain_s / samples.back());
    total += samples.back() + 4 * plain_s;  // about what it took to empty the caches
  }
  result.of_plain_read = to_timing(std::move(ratios)).median_s;
  result.timing = to_timing(std::move(samples));
}

}  // namespace

void run_forward(Workload& work) {
  const Options given = work.options;
  work.options.kernel = {}, work.options.tile = {};  // a choice for the backward pass does not apply to forward
  const auto workspace = attach_workspace(work, Pass::forward);
  call(work, Pass::forward);
  work.options.kernel = given.kernel, work.options.tile = given.tile;
}

Timing to_timing(std::vector<double> samples) {
  if (samples.empty()) return {};
  std::sort(samples.begin(), samples.end());
  const auto at = [&](double part) {
    return samples[static_cast<std::size_t>(part * static_cast<double>(samples.size() - 1))];
  };
  return {at(0.5), at(0.1), at(0.9), static_cast<int>(samples.size())};
}

bool is_backward(Pass pass) {
  return pass == Pass::backward || pass == Pass::standard_backward || pass == Pass::second;
}

double min_bytes(const Problem& p, Pass pass) {
  const auto rows = static_cast<double>(p.batch * (p.seq_q * p.heads_q + p.seq_kv * p.heads_kv));
  const auto dims = static_cast<double>(p.head_dim + (p.head_dim_v ? p.head_dim_v : p.head_dim));
  return rows * dims * static_cast<double>(size_of(p.dtype)) * (is_backward(pass) ? 2 : 1);
}

bool is_decoding(const Problem& problem) {
  return problem.seq_q > 0 && problem.seq_q <= 16 && problem.seq_kv >= 16 * problem.seq_q;
}

bool Measurement::ok() const {
  return std::all_of(accuracy.begin(), accuracy.end(), [](const Accuracy& a) { return a.ok(); });
}

double Measurement::flops_per_second() const {
  return timing.samples ? flops(problem, pass) * visible_share(problem) / timing.median_s : 0;
}

double Measurement::kv_bytes_per_second() const {
  const std::int64_t width = problem.head_dim + (problem.head_dim_v != 0 ? problem.head_dim_v : problem.head_dim);
  const auto elements = static_cast<double>(problem.batch * problem.seq_kv * problem.heads_kv * width);
  const Dtype dtype = problem.kv_dtype.value_or(problem.dtype);
  double bytes = elements * static_cast<double>(size_of(dtype));
  if (has_groups(dtype)) {
    const double of_group = dtype == Dtype::int4 ? 2.0 * static_cast<double>(size_of(problem.dtype)) : 1;
    bytes = elements / 2 + elements / static_cast<double>(columns_of_group(dtype, problem.kv_group)) * of_group;
  }
  return timing.samples ? bytes / timing.median_s : 0;
}

double Measurement::extra_bytes() const {
  return static_cast<double>(peak_extra_bytes >= 0 ? peak_extra_bytes : workspace_bytes);
}

Measurement measure(const Problem& problem, Pass pass, const Options& options, const MeasureLimits& limits) {
  // A refusal comes before the inputs are made.
  make_plan(problem, pass, device_info(options.device), options.kernel, options.tile);
  Workload work = make_workload(problem, options, is_backward(pass));
  if (is_backward(pass)) run_forward(work);
  if (pass == Pass::tangent || pass == Pass::second) work.out_tangent = Array(options.device, work.out.bytes());
  return measure(work, pass, limits);
}

Measurement measure(Workload& work, Pass pass, const MeasureLimits& limits) {
  Measurement result;
  result.problem = work.problem;
  result.pass = pass;
  result.device = work.options.device;
  const Plan plan = make_plan(work.problem, pass, device_info(result.device), work.options.kernel, work.options.tile);
  result.kernel = plan.kernel;
  const MemoryMeter meter;
  const auto workspace = attach_workspace(work, pass);
  result.workspace_bytes = static_cast<std::int64_t>(work.options.workspace_bytes);
  const bool emulated = device_traits(result.device).emulated;
  if (emulated) emulator::count_accesses(true);
  if (emulated) emulator::reset_counters();
  std::optional<Array> repairs;
  if (plan.counts_repairs) {
    repairs.emplace(result.device, sizeof(std::uint32_t));
    *static_cast<std::uint32_t*>(repairs->host()) = 0;
    repairs->upload();
    work.options.repairs = static_cast<std::uint32_t*>(repairs->device());
  }
  call(work, pass);  // warm-up, and the call that is checked
  work.options.repairs = nullptr;
  if (repairs) {
    repairs->download();
    result.repaired_tiles = *static_cast<const std::uint32_t*>(repairs->host());
  }
  if (emulated) result.counters = emulator::counters();
  if (!device_traits(result.device).gpu_kernels) result.peak_extra_bytes = meter.peak_growth_bytes();
  if (limits.check && pass != Pass::second)  // which has no such check; of forward mode out and lse have
    result.accuracy = is_backward(pass) ? check_backward(work) : check_forward(work);
  time_calls(work, limits, result);
  return result;
}

}  // namespace flash_attention::cli
