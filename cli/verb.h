#pragma once

#include <span>
#include <string_view>
#include <vector>

#include "cli/problem/arguments.h"

namespace flash_attention::cli {

/// Exit codes of the command, in addition to 0. An Error exits with its own code. 2: a request that cannot be served (a
/// wrong flag, a refused problem, no kernel for it). 3: the device or compiler is missing. 4: out of memory. 5: a kernel
/// does not compile. 6: the device fails. 7: a bug of this library.
enum ExitCode { ok = 0, check_failed = 1, bad_usage = 2, output_lost = 8, interrupted_by_user = 130 };

/// One word after `flash-attention`. Each lives in the file of its name and is listed in main.cpp.
struct Verb {
  std::string_view name;
  std::string_view summary;  ///< one line, for the list of verbs
  std::string_view about;    ///< the help text: usage, output, examples
  std::size_t max_words = 0;
  std::vector<Flag> flags;
  int (*run)(const Arguments& arguments);
};

extern const Verb run_verb;
extern const Verb bench_verb;
extern const Verb plan_verb;
extern const Verb doctor_verb;
extern const Verb compile_verb;
extern const Verb cache_verb;
extern const Verb ladder_verb;
extern const Verb primer_verb;
extern const Verb profile_verb;
extern const Verb report_verb;
extern const Verb stress_verb;
extern const Verb generate_verb;
extern const Verb tune_verb;
extern const Verb trace_verb;

/// In the order in which the command lists them.
std::span<const Verb* const> all_verbs();

}  // namespace flash_attention::cli
