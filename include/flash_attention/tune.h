#pragma once

#include <cstddef>
#include <functional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "flash_attention/device.h"
#include "flash_attention/export.h"
#include "flash_attention/plan.h"
#include "flash_attention/problem.h"

/// Measures on this machine alternatives to the planner's rules, and keeps those that are faster: docs/your_gpu.md.
namespace flash_attention {

/// A call to tune.
struct TuneCase {
  Problem problem;
  Pass pass = Pass::forward;  ///< forward or backward
};

/// The result for one case.
struct TuneResult {
  TuneCase tuned;
  std::string usual{};           ///< the planner's own choice, in words
  std::string choice{};          ///< the fastest; the planner's own if none is faster by more than the noise
  double usual_seconds = 0;
  double seconds = 0;
  double gain = 1;               ///< usual_seconds / seconds, from samples taken alternately
  double noise = 0;              ///< of the gain
  int contestants = 0;           ///< measured choices, the usual one included
  std::vector<std::string> dropped{};  ///< choices whose results were wrong or that did not compile, and why
  std::string skipped{};         ///< why it was not measured; empty if it was
};

struct TuneProgress {
  std::size_t done = 0;  ///< cases
  std::size_t of = 0;
  std::string now{};     ///< the case that is being measured
  double seconds = 0;    ///< since the beginning
};

struct TuneLimits {
  double seconds = 60;  ///< limit for everything, compilation included; results until then are kept
  bool again = false;   ///< repeats cases that have been tuned before
  std::function<bool()> stops{};  ///< called between samples; true: stop and keep the results so far
  std::function<void(const TuneProgress&)> progress{};
  std::function<void(const TuneResult&)> result{};  ///< called for each result
};

struct TuneReport {
  std::vector<TuneResult> results;
  bool finished = true;  ///< false: it was stopped, or the time was over
  std::string path;      ///< where the choices are kept; empty if they are not
};

/// Tunes each case on a device, which must have real time, and keeps the choices beside the compiled kernels. Later
/// calls of this and other processes use them, except calls with Problem::invariant. Throws Error.
FLASH_ATTENTION_API TuneReport tune(Device device, std::span<const TuneCase> cases, const TuneLimits& limits = {});

/// Compiles everything that tune() would measure, and measures nothing. Returns the number of kernels.
FLASH_ATTENTION_API std::size_t compile_for_tuning(Device device, std::span<const TuneCase> cases);

/// Times the cases as they are planned now; fills in `choice` and `seconds`. Nothing is chosen or kept. Takes about
/// `seconds` for each.
FLASH_ATTENTION_API std::vector<TuneResult> time_cases(Device device, std::span<const TuneCase> cases, double seconds);

/// Reads cases from text: a JSON array of {"pass": "forward", "problem": {"seq_q": ...}}, or one such object a line, as
/// FLASH_ATTENTION_RECORD writes them. Equal cases count once. Throws Error(invalid_argument), which names `name` and
/// the place.
FLASH_ATTENTION_API std::vector<TuneCase> parse_tune_cases(std::string_view text, const std::string& name);

/// Common calls of most programs, sized for a device.
FLASH_ATTENTION_API std::vector<TuneCase> usual_tune_cases(const DeviceInfo& device);

/// All tuned choices of a device, as a text to share: import_tuned() reads it on another machine with the same GPU.
FLASH_ATTENTION_API std::string export_tuned(Device device);

/// Adds the choices of such a text. Returns the number of cases. Throws Error(invalid_argument), which names `name`, if
/// the text is damaged, or is from another GPU or another version of the library.
FLASH_ATTENTION_API std::size_t import_tuned(Device device, std::string_view text, const std::string& name);

}  // namespace flash_attention
