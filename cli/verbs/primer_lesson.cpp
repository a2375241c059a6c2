#include "cli/verbs/primer_lesson.h"

#include "cli/measure/array.h"
#include "cli/measure/gpu_clock.h"

namespace flash_attention::cli {
namespace {

constexpr int samples = 30;

unsigned ceil_div(std::int64_t a, std::int64_t b) { return static_cast<unsigned>((a + b - 1) / b); }

PlainLaunch thread_per_element(const LessonSize& size, const DeviceInfo&) {
  return {{ceil_div(size.elements(), 256), 1}, {256, 1}};
}

/// All the threads that the GPU can hold at once, and no more blocks than there is work for.
PlainLaunch full_gpu(const LessonSize& size, const DeviceInfo& info) {
  const auto resident = static_cast<unsigned>(info.num_sms * (2048 / 256));
  return {{std::min(resident, ceil_div(size.elements(), 4 * 256)), 1}, {256, 1}};
}

PlainLaunch x_along_rows(const LessonSize& size, const DeviceInfo&) {
  return {{ceil_div(size.columns, 32), ceil_div(size.rows, 8)}, {32, 8}};
}

PlainLaunch x_along_columns(const LessonSize& size, const DeviceInfo&) {
  return {{ceil_div(size.rows, 32), ceil_div(size.columns, 8)}, {32, 8}};
}

/// Multiples of 2^-12 in [-8, 8), the same on every machine.
float sample(std::int64_t index, std::uint32_t seed) {
  const auto mixed = (static_cast<std::uint32_t>(index) + seed) * 2654435761u;
  return static_cast<float>(mixed >> 16) / 4096.0f - 8.0f;
}

struct Operands {
  Operands(Device device, std::int64_t elements)
      : count(elements), a(device, bytes()), b(device, bytes()), c(device, bytes()) {
    auto *x = static_cast<float*>(a.host()), *y = static_cast<float*>(b.host());
    auto* z = static_cast<float*>(c.host());
    for (std::int64_t i = 0; i < count; ++i) {
      x[i] = sample(i, 1);
      y[i] = sample(i, 77777);
      z[i] = -100;  // no sum of the two
    }
    for (const Array* array : {&a, &b, &c}) array->upload();
  }

  std::size_t bytes() const { return static_cast<std::size_t>(count) * sizeof(float); }

  std::int64_t wrong() const {
    c.download();
    const auto *x = static_cast<const float*>(a.host()), *y = static_cast<const float*>(b.host());
    const auto* z = static_cast<const float*>(c.host());
    std::int64_t sum = 0;
    for (std::int64_t i = 0; i < count; ++i) sum += z[i] != x[i] + y[i];
    return sum;
  }

  std::int64_t count;
  Array a, b, c;
};

template <typename Work>
Timing time_on_gpu(const DeviceInfo& info, const Work& queue_work) {
  GpuClock clock(info);
  std::vector<double> times;
  for (int i = 0; i < samples; ++i) times.push_back(clock.seconds(nullptr, queue_work));
  return to_timing(std::move(times));
}

}  // namespace

const std::vector<Lesson>& lessons() {
  static const std::vector<Lesson> all{
      {"vector_add_simple", "primer/vector_add_simple", "one thread an element", false, thread_per_element},
      {"vector_add", "primer/vector_add", "16-byte accesses, grid-stride loop", false, full_gpu},
      {"matrix_add", "primer/matrix_add", "2-D blocks, x along the row", true, x_along_rows},
      {"matrix_add_by_columns", "primer/matrix_add", "the same, x down the column", true, x_along_columns},
  };
  return all;
}

double LessonResult::sectors_per_request() const {
  return counters ? static_cast<double>(counters->global_sectors) / static_cast<double>(counters->global_requests) : 0;
}

double LessonResult::used_of_sectors() const {
  return counters ? size.bytes() / (32.0 * static_cast<double>(counters->global_sectors)) : 0;
}

LessonResult run_lesson(const Lesson& lesson, const LessonSize& size, const DeviceInfo& info) {
  LessonResult result;
  result.lesson = &lesson;
  result.size = size;
  result.launch = lesson.shape(size, info);
  const auto kernel = load_plain_kernel(std::string(lesson.unit), std::string(lesson.name), info);
  const Operands operands(info.device, size.elements());

  void *a = operands.a.device(), *b = operands.b.device(), *c = operands.c.device();
  auto rows = static_cast<int>(size.rows), columns = static_cast<int>(size.columns);
  long long elements = size.elements();
  void* for_vector[] = {&a, &b, &c, &elements};
  void* for_matrix[] = {&a, &b, &c, &rows, &columns};
  void* const* parameters = lesson.takes_matrix ? for_matrix : for_vector;

  const bool emulated = device_traits(info.device).emulated;
  if (emulated) emulator::count_accesses(true);
  if (emulated) emulator::reset_counters();
  kernel->launch(result.launch, parameters, nullptr);
  if (emulated) result.counters = emulator::counters();
  result.wrong = operands.wrong();
  if (!emulated) result.timing = time_on_gpu(info, [&] { kernel->launch(result.launch, parameters, nullptr); });
  return result;
}

double copy_bytes_per_second(const LessonSize& size, const DeviceInfo& info) {
  const auto bytes = static_cast<std::size_t>(size.elements()) * sizeof(float);
  cuda::DeviceMemory from(info.device.index, bytes), to(info.device.index, bytes);
  from.fill(1);
  to.copy_from(from);
  return 2.0 * static_cast<double>(bytes) / time_on_gpu(info, [&] { to.copy_from(from); }).median_s;
}

}  // namespace flash_attention::cli
