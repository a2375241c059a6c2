#include <algorithm>
#include <cstdio>
#include <filesystem>
#include <fstream>
#include <optional>
#include <sstream>

#include "cli/ladder/exercise.h"
#include "cli/ladder/ladder_cpu.h"
#include "cli/ladder/ladder_emulated.h"
#include "cli/ladder/ladder_gpu.h"
#include "cli/ladder/ladder_page.h"
#include "cli/output/format.h"
#include "cli/output/report.h"
#include "cli/output/terminal.h"
#include "cli/problem/problem_flags.h"
#include "cli/verb.h"

namespace flash_attention::cli {
namespace {

constexpr std::size_t context = 3;  // lines around a change

int show_diff(const std::vector<std::string>& words) {
  if (words.size() != 2) {
    throw Error(ErrorCode::invalid_argument, "--diff: got " + std::to_string(words.size()) +
                                                 " rungs, allowed: two, such as flash-attention ladder --diff 06 07");
  }
  const std::vector<Rung> pair = rungs_named(words);
  const std::vector<DiffLine> lines = diff(pair[0].source, pair[1].source);
  std::printf("--- %s\n+++ %s\n", pair[0].file.c_str(), pair[1].file.c_str());
  std::size_t next = 0;  // the first line that is not printed yet
  for (std::size_t i = 0; i < lines.size(); ++i) {
    if (lines[i].mark == ' ') continue;
    const std::size_t from = std::max(next, i - std::min(i, context));
    if (from > next || next == 0) std::puts("@@");
    std::size_t end = i + 1;
    for (std::size_t calm = 0; end < lines.size() && calm < context; ++end) calm = lines[end].mark == ' ' ? calm + 1 : 0;
    for (next = from; next < end; ++next) {
      std::printf("%c%.*s\n", lines[next].mark, static_cast<int>(lines[next].text.size()), lines[next].text.data());
    }
    i = end - 1;
  }
  return ok;
}

int exercise(const Arguments& arguments) {
  const std::string word = arguments.text("exercise");
  if (!arguments.words().empty())
    throw Error(ErrorCode::invalid_argument, "--exercise: got rungs beside it, allowed: one, such as --exercise 03");
  const std::string folder = arguments.given("folder") ? arguments.text("folder") : exercise_folder(word);
  return arguments.on("check") ? check_exercise(word, folder) : begin_exercise(word, folder);
}

int ladder(const Arguments& arguments) {
  if (arguments.given("exercise")) return exercise(arguments);
  if (arguments.on("check") || arguments.given("folder"))
    throw Error(ErrorCode::invalid_argument, "--check and --folder: allowed with --exercise RUNG");
  if (arguments.on("diff")) return show_diff(arguments.words());
  std::vector<Rung> chosen = rungs_named(arguments.words());
  if (arguments.on("update") && !arguments.words().empty())
    throw Error(ErrorCode::invalid_argument, "--update: got single rungs, allowed: all, since the table has all");
  const std::string name = arguments.text("device");
  const bool only_cpu =
      std::all_of(chosen.begin(), chosen.end(), [](const Rung& rung) { return !device_traits(rung.device).gpu_kernels; });
  const bool on_cpu = name == "cpu" || (name == "best" && only_cpu);
  std::erase_if(chosen, [&](const Rung& rung) { return device_traits(rung.device).gpu_kernels == on_cpu; });
  if (chosen.empty()) {
    throw Error(ErrorCode::invalid_argument, "--device: got " + name +
                                                 ", on which none of the named rungs runs; c0 to c3 " +
                                                 "take cpu, the others cuda or emulator");
  }
  if (on_cpu) return climb_on_cpu(chosen, arguments);
  const Device best = name == "best" ? best_device() : parse_device(name);
  if (device_traits(best).streams) return climb_on_gpu(chosen, device_info(best), arguments);
  if (arguments.on("update")) {
    const std::filesystem::path root = arguments.text("root"), file = root / "bench/results/h200/ladder.json";
    std::ifstream stream(file);
    std::stringstream content;
    content << stream.rdbuf();
    update_pages(root, file, chosen, results_from(content.str(), file.string()));
    return ok;
  }
  return climb_emulated(chosen, arguments);
}

}  // namespace

const Verb ladder_verb{
    "ladder",
    "the teaching ladder: every step from a naive kernel to a fast one, checked and timed",
    "flash-attention ladder [RUNG...]: kernels/ladder/ holds one kernel for each idea, each a small change of the one\n"
    "before. With a GPU every rung is compared with fp64 and timed. Without one every rung runs in the emulator, which\n"
    "counts its bank conflicts, bytes of global memory and FLOPs, next to the times measured on an H200. Begin with\n"
    "docs/ladder/README.md; a page for each rung explains its change. --device cpu climbs the ladder of the CPU instead:\n"
    "scalar, blocked online softmax, SIMD, threads.\n"
    "\n"
    "Examples:\n"
    "  flash-attention ladder                       all rungs\n"
    "  flash-attention ladder 06 07                 two of them\n"
    "  flash-attention ladder --diff 06 07          the change that one makes to the other\n"
    "  flash-attention ladder --device emulator --seq 256 --head-dim 128 --causal\n"
    "  flash-attention ladder --device cpu          the four steps on the CPU, and the library's kernel\n"
    "  flash-attention ladder --exercise 03         a copy of rung 03 with a bug to find; with --check: is it repaired?\n"
    "  flash-attention ladder --update              rewrites kernels/ladder/README.md and the plots in "
    "docs/ladder/images;\n"
    "                                               measures first if there is a GPU\n"
    "Any rung is a kernel like every other: flash-attention run --kernel ladder/06_mma --dtype bf16 --head-dim 128\n"
    "\n"
    "Exits with 1 if a rung is wrong.\n",
    32,
    {{"diff", "", "show how the second of two rungs differs from the first"},
     {"exercise", "RUNG", "write a copy of the kernels with a bug in 01, 02, 03, 04, 06, 09, 10, 13 or b1"},
     {"check", "", "with --exercise: run the copy in the emulator and say whether the bug is repaired"},
     {"folder", "FOLDER", "folder of the exercise [= exercise_RUNG]"},
     {"device", "D", "cuda, cuda:N, emulator, cpu or best", "best"},
     {"seq", "N", "queries and keys of the emulated problem; 1024 on the CPU", "128"},
     {"head-dim", "N", "its head dimension: a multiple of 8, at most 128", "64"},
     {"causal", "", "with a causal mask (emulator and CPU; a GPU is timed with and without)"},
     {"sweep", "", "GPU: also by length, as in the plots"},
     {"seconds", "S", "GPU and CPU: time to spend on each rung and problem", "0.2"},
     {"update", "", "rewrite the ladder's table and plots"},
     {"root", "FOLDER", "the source tree that --update writes to", "."},
     {"save", "FILE", "GPU: write the measurements as JSON"},
     {"json", "", "print JSON instead of the table"}},
    ladder};

}  // namespace flash_attention::cli
