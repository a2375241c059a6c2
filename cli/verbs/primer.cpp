#include <cstdio>

#include "cli/output/format.h"
#include "cli/output/report.h"
#include "cli/output/terminal.h"
#include "cli/problem/problem_flags.h"
#include "cli/verb.h"
#include "cli/verbs/primer_lesson.h"

namespace flash_attention::cli {
namespace {

/// A GPU if there is one, else the emulator.
Device device_for_lessons(const Arguments& arguments) {
  if (arguments.text("device") == "best" && !arguments.given("arch")) {
    const Device best = best_device();
    return device_traits(best).gpu_kernels ? best : Device{DeviceKind::emulator, 0, 0};
  }
  const Device device = device_from(arguments);
  if (!device_traits(device).gpu_kernels) {
    throw Error(ErrorCode::invalid_argument, "--device: got cpu, allowed: cuda, cuda:N, emulator, best");
  }
  return device;
}

/// Large enough to measure DRAM on a GPU; small enough for the emulator to answer at once.
LessonSize size_from(const Arguments& arguments, bool emulated) {
  constexpr std::int64_t most = 65535 * 8;  // what a grid's y can cover with blocks of 8
  LessonSize size = emulated ? LessonSize{128, 256} : LessonSize{8192, 8192};
  if (arguments.given("rows")) size.rows = arguments.integer("rows", 1, most);
  if (arguments.given("columns")) size.columns = arguments.integer("columns", 1, most);
  return size;
}

std::vector<const Lesson*> chosen(const Arguments& arguments) {
  std::vector<const Lesson*> all;
  for (const Lesson& lesson : lessons()) all.push_back(&lesson);
  if (arguments.words().empty()) return all;
  std::string names;
  for (const Lesson* lesson : all) {
    if (lesson->name == arguments.words()[0]) return {lesson};
    names += (names.empty() ? "" : ", ") + std::string(lesson->name);
  }
  throw Error(ErrorCode::invalid_argument, "primer: got '" + arguments.words()[0] + "', allowed: " + names);
}

std::string shape_text(const std::array<unsigned, 2>& shape) {
  return shape[1] == 1 ? std::to_string(shape[0]) : format("%u x %u", shape[0], shape[1]);
}

std::string percent(double part) { return format("%.1f %%", 100 * part); }

void print(const std::vector<LessonResult>& results, const DeviceInfo& info, double copy_speed) {
  const LessonSize& size = results.front().size;
  std::printf("device  %s\n", describe(info).c_str());
  std::printf("size    %lld x %lld floats: %s moved by each kernel\n", static_cast<long long>(size.rows),
              static_cast<long long>(size.columns), format_bytes(size.bytes()).c_str());
  const bool emulated = copy_speed == 0;
  if (!emulated) std::printf("copy    %.0f GB/s read and written by the driver's own copy\n", copy_speed / 1e9);
  std::vector<std::string> head{"kernel", "teaches", "grid", "block"};
  for (const char* name : emulated ? std::vector{"requests", "sectors", "a request", "of them used", "result"}
                                   : std::vector{"time", "GB/s", "of copy", "result"}) {
    head.emplace_back(name);
  }
  Table table(head);
  for (const LessonResult& r : results) {
    std::vector<std::string> row{std::string(r.lesson->name), std::string(r.lesson->teaches), shape_text(r.launch.grid),
                                 shape_text(r.launch.block)};
    if (r.counters) {
      row.push_back(std::to_string(r.counters->global_requests));
      row.push_back(std::to_string(r.counters->global_sectors));
      row.push_back(format("%.1f", r.sectors_per_request()));
      row.push_back(percent(r.used_of_sectors()));
    } else {
      row.push_back(format_seconds(r.timing.median_s));
      row.push_back(format("%.0f", r.bytes_per_second() / 1e9));
      row.push_back(percent(r.bytes_per_second() / copy_speed));
    }
    row.push_back(r.wrong == 0 ? "right" : format("%lld WRONG", static_cast<long long>(r.wrong)));
    table.add(row);
  }
  std::printf("\n%s", table.text().c_str());
  std::puts(
      emulated
          ? "\nA request is one load or store of a warp; a sector is 32 bytes, the least that memory moves. 'of them used' "
            "is\n"
            "the part of the sectors' bytes that was asked for. An emulated GPU has no time; a real one shows GB/s here."
          : "\nGB/s counts two floats read and one written an element; 'of copy' compares with the driver's copy above.");
}

Json lesson_json(const LessonResult& r, double copy_speed) {
  Json json = Json::object();
  json.add("kernel", r.lesson->name).add("teaches", r.lesson->teaches);
  json.add("rows", r.size.rows).add("columns", r.size.columns).add("bytes", r.size.bytes());
  Json grid = Json::array(), block = Json::array();
  for (const unsigned n : r.launch.grid) grid.push(n);
  for (const unsigned n : r.launch.block) block.push(n);
  json.add("grid", grid).add("block", block).add("wrong", r.wrong);
  if (r.counters) {
    json.add("requests", r.counters->global_requests).add("sectors", r.counters->global_sectors);
    json.add("sectors_per_request", r.sectors_per_request()).add("used_of_sectors", r.used_of_sectors());
  } else {
    json.add("median_s", r.timing.median_s).add("low_s", r.timing.low_s).add("high_s", r.timing.high_s);
    json.add("samples", r.timing.samples).add("bytes_per_second", r.bytes_per_second());
    json.add("of_copy", r.bytes_per_second() / copy_speed);
  }
  return json;
}

int primer(const Arguments& arguments) {
  const std::vector<const Lesson*> wanted = chosen(arguments);
  if (arguments.on("source")) {
    for (std::string_view shown; const Lesson* lesson : wanted) {
      if (lesson->unit != shown) std::fputs(plain_kernel_source(std::string(lesson->unit)).c_str(), stdout);
      shown = lesson->unit;
    }
    return ok;
  }
  const DeviceInfo info = device_info(device_for_lessons(arguments));
  const bool emulated = device_traits(info.device).emulated;
  const LessonSize size = size_from(arguments, emulated);

  Progress progress;
  std::vector<LessonResult> results;
  std::int64_t wrong = 0;
  for (const Lesson* lesson : wanted) {
    progress.show("running " + std::string(lesson->name) + " ...");
    results.push_back(run_lesson(*lesson, size, info));
    wrong += results.back().wrong;
    if (interrupted()) return interrupted_by_user;
  }
  const double copy_speed = emulated ? 0 : copy_bytes_per_second(size, info);
  progress.clear();

  if (arguments.on("json")) {
    Json list = Json::array(), json = Json::object();
    for (const LessonResult& result : results) list.push(lesson_json(result, copy_speed));
    json.add("device_info", to_json(info));
    if (!emulated) json.add("copy_bytes_per_second", copy_speed);
    std::puts(json.add("lessons", list).text().c_str());
  } else {
    print(results, info, copy_speed);
  }
  return wrong == 0 ? ok : check_failed;
}

}  // namespace

const Verb primer_verb{
    "primer",
    "first steps in CUDA: three small kernels, run, checked and measured",
    "Runs the kernels of kernels/primer, the steps before the ladder: the index of a thread, why neighbouring threads\n"
    "should read neighbouring elements (coalescing), the shape of a launch, and the bandwidth that is left to gain. Each\n"
    "file also holds its host program (allocate, copy, launch, check, free) and the command that builds it with nvcc.\n"
    "\n"
    "On a GPU it shows the time, and the bandwidth as a part of that of the driver's own copy in the same run.\n"
    "Without one it runs the same sources in the emulator and shows how many 32-byte sectors each request of a warp\n"
    "touches: 4 is ideal for floats, 16 for float4; 32 means a separate sector for every thread.\n"
    "\n"
    "Examples:\n"
    "  flash-attention primer                                   all, on the GPU or in the emulator\n"
    "  flash-attention primer --source vector_add_simple        read it first\n"
    "  flash-attention primer matrix_add --columns 100          rows that do not begin at a sector\n"
    "\n"
    "docs/primer.md explains them. Exits with 1 if a sum is wrong.\n",
    1,
    {{"rows", "N", "rows of the matrices; vectors have rows * columns elements [8192; emulator: 128]"},
     {"columns", "N", "columns of the matrices [8192; emulator: 256]"},
     {"device", "D", "cuda, cuda:N, emulator or best", "best"},
     {"arch", "A", "architecture that the emulator plays: sm_80, sm_90"},
     {"source", "", "print the file instead of running it"},
     {"json", "", "print JSON"}},
    primer};

}  // namespace flash_attention::cli
