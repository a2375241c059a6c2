#pragma once

#include <optional>
#include <string_view>
#include <vector>

#include "api/plain_kernel.h"
#include "cli/measure/measure.h"

namespace flash_attention::cli {

/// The size of a lesson: a matrix, or a vector of as many elements.
struct LessonSize {
  std::int64_t rows = 0;
  std::int64_t columns = 0;

  std::int64_t elements() const { return rows * columns; }
  double bytes() const { return 12.0 * static_cast<double>(elements()); }  ///< two floats read, one written
};

/// One kernel of kernels/primer.
struct Lesson {
  std::string_view name;
  std::string_view unit;  ///< its file, without the ending
  std::string_view teaches;
  bool takes_matrix = false;  ///< parameters: rows and columns, else the number of elements
  PlainLaunch (*shape)(const LessonSize& size, const DeviceInfo& info) = nullptr;
};
const std::vector<Lesson>& lessons();

struct LessonResult {
  const Lesson* lesson = nullptr;
  LessonSize size;
  PlainLaunch launch;
  std::int64_t wrong = 0;  ///< elements that differ from the host's sum
  Timing timing;           ///< GPU
  std::optional<emulator::Counters> counters;

  double bytes_per_second() const { return timing.samples ? size.bytes() / timing.median_s : 0; }
  double sectors_per_request() const;  ///< emulator; 0 elsewhere
  double used_of_sectors() const;      ///< emulator: the part of the touched bytes that was requested
};

LessonResult run_lesson(const Lesson& lesson, const LessonSize& size, const DeviceInfo& info);

/// Bytes a second, read and written, of the driver's own copy within the GPU: what the lessons are held against.
double copy_bytes_per_second(const LessonSize& size, const DeviceInfo& info);

}  // namespace flash_attention::cli
