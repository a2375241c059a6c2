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

/// Measures on this machine what the planner decides by rules, and keeps what is faster: docs/your_gpu.md.
namespace flash_attention {

/// A call to be tuned.
struct TuneCase {
  Problem problem;
  Pass pass = Pass::forward;  ///< forward or backward
};

/// What came of one.
struct TuneResult {
  TuneCase tuned;
  std::string usual{};           ///< the planner's own choice, in words
  std::string choice{};          ///< the fastest; the same where none is faster by more than the noise
  double usual_seconds = 0;
  double seconds = 0;
  double gain = 1;               ///< usual_seconds over seconds, from samples that were taken in turns
  double noise = 0;              ///< of the gain
  int contestants = 0;           ///< choices that were measured, the usual one included
  std::vector<std::string> dropped{};  ///< choices whose results were wrong or that did not compile, and why
  std::string skipped{};         ///< why it was not measured; empty if it was
};

struct TuneProgress {
  std::size_t done = 0;  ///< cases
  std::size_t of = 0;
  std::string now{};     ///< what is measured
  double seconds = 0;    ///< since the beginning
};

struct TuneLimits {
  double seconds = 60;  ///< for everything, compilation included: what was measured until then is kept
  bool again = false;   ///< also what has been tuned before
  std::function<bool()> stops{};  ///< asked between samples; true: stop with what there is
  std::function<void(const TuneProgress&)> progress{};
  std::function<void(const TuneResult&)> result{};  ///< as soon as there is one
};

struct TuneReport {
  std::vector<TuneResult> results;
  bool finished = true;  ///< else it was stopped, or the time was over
  std::string path;      ///< where the choices are kept; empty where they are not
};

/// Tunes each case on a device, which must have real time, and keeps the choices beside the compiled kernels. Later calls of
/// this and other processes use them, but for those with Problem::invariant. Throws Error.
FLASH_ATTENTION_API TuneReport tune(Device device, std::span<const TuneCase> cases, const TuneLimits& limits = {});

/// Compiles what tune() would measure, and measures nothing; returns how many kernels there are.
FLASH_ATTENTION_API std::size_t compile_for_tuning(Device device, std::span<const TuneCase> cases);

/// The cases as they are planned now, in `choice` and `seconds`; nothing is chosen or kept. About `seconds` for each.
FLASH_ATTENTION_API std::vector<TuneResult> time_cases(Device device, std::span<const TuneCase> cases, double seconds);

/// Cases from text: a JSON array of {"pass": "forward", "problem": {"seq_q": ...}}, or one such object a line, as
/// FLASH_ATTENTION_RECORD writes them; each once. Throws Error(invalid_argument) that names `name` and the place.
FLASH_ATTENTION_API std::vector<TuneCase> parse_tune_cases(std::string_view text, const std::string& name);

/// What most programs call, sized for a device.
FLASH_ATTENTION_API std::vector<TuneCase> usual_tune_cases(const DeviceInfo& device);

/// Everything that is known of a device, as a text to share: import_tuned of another machine with the same GPU takes it.
FLASH_ATTENTION_API std::string export_tuned(Device device);

/// Adds such a text; returns the number of its cases. Throws Error(invalid_argument) that names `name` where it is damaged, of
/// another GPU, or of another version of the library.
FLASH_ATTENTION_API std::size_t import_tuned(Device device, std::string_view text, const std::string& name);

}  // namespace flash_attention
