#include "cli/ladder/exercise.h"

#include <algorithm>
#include <array>
#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <iterator>
#include <string_view>
#include <vector>

#include "cli/ladder/rung.h"
#include "cli/output/format.h"
#include "cli/output/terminal.h"
#include "cli/verb.h"
#include "cli/verbs/process.h"
#include "flash_attention/error.h"
#include "jit/embedded.h"

namespace flash_attention::cli {
namespace {

namespace fs = std::filesystem;

/// A bug to find: a place of a rung, and what stands there instead.
struct Exercise {
  std::string_view word;      // as it is typed: "03"
  std::string_view right;     // occurs once in the rung
  std::string_view wrong;     // what the copy has
  std::string_view question;  // what the reader thinks about first
};

constexpr std::array exercises = {
    Exercise{"01", "row_sum = ptx::fma(row_sum, rescale, P);", "row_sum += P;",
             "A larger maximum changes what everything so far is relative to. Does everything follow?"},
    Exercise{"02", "const int last = features.window_right ? i + args.seq_kv - args.seq_q : args.seq_kv - 1;",
             "const int last = features.window_right ? i : args.seq_kv - 1;",
             "Which key does the last query see under a causal mask if there are more keys than queries?"},
    Exercise{"03", "    __syncthreads();  // every warp is done with the previous tile\n", "",
             "Four warps share the tile. When may the next one be written over it?"},
    Exercise{"04", "O[r][c] = ptx::fma(O[r][c], rescale[r], PV[c]);", "O[r][c] += PV[c];",
             "The product of a tile begins at 0, relative to the newest maximum. What is O relative to?"},
    Exercise{"06", "O[0][n][e] *= rescale[e / 2];", "O[0][n][e] *= rescale[e % 2];",
             "A thread has four elements of an accumulator. Which two are in the same row?"},
    Exercise{"09",
             "    load_keys(kv_begin + block_kv);  // past the last tile: zeros that are not read\n"
             "    ptx::copy_async_wait<1>();",
             "    load_keys(kv_begin + block_kv);  // past the last tile: zeros that are not read\n"
             "    ptx::copy_async_wait<2>();",
             "copy_async_wait<N> waits until at most N groups of copies are on their way. How many may be?"},
    Exercise{"10", "if (!sight.template all_visible<block_q, block_kv>(q_begin, kv_begin)) {",
             "if (kv_begin + block_kv > args.seq_kv) {",
             "Which tiles need a look at single scores: those at the end of the keys alone?"},
    Exercise{"13", "ptx::mbarrier_init(storage.K_empty[stage], Kernel::warpgroups);",
             "ptx::mbarrier_init(storage.K_empty[stage], 1);",
             "The producer may overwrite a stage when everybody has read it. Who arrives at its barrier?"},
    Exercise{"b1", "P * (dP[r] - delta));", "P * dP[r]);",
             "The probabilities of a row add up to 1. What must dS of a row add up to?"},
};

const Exercise& exercise_named(const std::string& word) {
  std::string words;
  for (const Exercise& exercise : exercises) {
    if (exercise.word == word) return exercise;
    words += (words.empty() ? "" : ", ") + std::string(exercise.word);
  }
  throw Error(ErrorCode::invalid_argument, "--exercise: got '" + word + "', allowed: " + words);
}

Rung rung_of(const Exercise& exercise) { return rungs_named({std::string(exercise.word) + "_"}).front(); }

void write_text(const fs::path& file, std::string_view text) {
  std::error_code ignored;
  fs::create_directories(file.parent_path(), ignored);
  std::ofstream stream(file, std::ios::binary);
  stream << text;
  if (!stream.flush()) throw Error(ErrorCode::invalid_argument, "--folder: " + file.string() + " cannot be written");
}

std::string with_bug(const Exercise& exercise, std::string text) {
  const std::size_t at = text.find(exercise.right);
  if (at == std::string::npos || text.find(exercise.right, at + 1) != std::string::npos)
    throw Error(ErrorCode::internal, "exercise " + std::string(exercise.word) + ": the place of the bug is not there once");
  return text.replace(at, exercise.right.size(), exercise.wrong);
}

/// `run` of the rung on one of the problems: all of them have more than one tile of queries and of keys, lengths that no
/// tile divides and, if causal, a diagonal that does not begin in the first corner.
std::vector<std::string> run_words(const Rung& rung, bool causal) {
  std::vector<std::string> words = {own_path(), "run", "--device", "emulator", "--arch", "sm_90", "--kernel", rung.kernel};
  words.insert(words.end(), {"--dtype", "bf16", "--heads", "2", "--head-dim", "64", "--seq-q", "163", "--seq-kv", "291"});
  if (rung.pass == Pass::backward) words.emplace_back("--backward");
  if (causal) words.emplace_back("--causal");
  return words;
}

/// What the reader needs of the output of a call that failed: lines of results that are wrong, or else all of it.
std::string reason(const std::string& output) {
  std::string wrong;
  for (std::size_t at = 0; at < output.size();) {
    const std::size_t end = std::min(output.find('\n', at), output.size());
    const std::string_view line = std::string_view(output).substr(at, end - at);
    if (line.starts_with("error") && !line.ends_with(": ok")) wrong += std::string(line) + "\n";
    at = end + 1;
  }
  return wrong.empty() ? output : wrong;
}

/// The command that checks it.
std::string check_words(const Exercise& exercise, const fs::path& folder) {
  const std::string word(exercise.word);
  const bool usual = folder == exercise_folder(word);
  return "flash-attention ladder --exercise " + word + " --check" + (usual ? "" : " --folder " + folder.string());
}

std::string typed(const std::vector<std::string>& words) {
  std::string text = "flash-attention";
  for (std::size_t w = 1; w < words.size(); ++w) text += " " + words[w];
  return text;
}

}  // namespace

std::string exercise_folder(const std::string& word) { return "exercise_" + std::string(exercise_named(word).word); }

int begin_exercise(const std::string& word, const fs::path& folder) {
  const Exercise& exercise = exercise_named(word);
  const Rung rung = rung_of(exercise);
  if (fs::exists(folder)) {
    throw Error(ErrorCode::invalid_argument, "--exercise: " + folder.string() +
                                                 " is there already and may hold your work; " +
                                                 check_words(exercise, folder) + " looks at it, --folder names another");
  }
  for (const jit::EmbeddedFile& file : jit::embedded_files()) {
    constexpr std::string_view runtime = "emulator/";
    const bool of_emulator = file.name.starts_with(runtime);
    const std::string_view below = of_emulator ? file.name.substr(runtime.size()) : file.name;
    write_text(folder / (of_emulator ? "src/emulator/runtime" : "kernels") / below, file.text);
  }
  write_text(folder / rung.file, with_bug(exercise, rung.source));
  std::printf(
      "Exercise %s: %s\nThis file has a bug that the library's does not have:\n\n  %s\n\n%.*s\n\nRepair it, then\n\n"
      "  %s\n\nsays whether it is right, and which input shows the bug if not.\n"
      "To try it yourself: FLASH_ATTENTION_KERNEL_DIR=%s %s\n",
      word.c_str(), rung.idea.c_str(), (folder / rung.file).c_str(), static_cast<int>(exercise.question.size()),
      exercise.question.data(), check_words(exercise, folder).c_str(), (folder / "kernels").c_str(),
      typed(run_words(rung, false)).c_str());
  return ok;
}

int check_exercise(const std::string& word, const fs::path& folder) {
  const Exercise& exercise = exercise_named(word);
  const Rung rung = rung_of(exercise);
  std::ifstream stream(folder / rung.file, std::ios::binary);
  if (!stream) {
    throw Error(ErrorCode::invalid_argument, "--check: there is no " + (folder / rung.file).string() +
                                                 "; flash-attention ladder --exercise " + word + " writes it");
  }
  const std::string text{std::istreambuf_iterator<char>(stream), {}};
  const std::string kernels = fs::absolute(folder / "kernels").string();
  ::setenv("FLASH_ATTENTION_KERNEL_DIR", kernels.c_str(), 1);
  constexpr int orders = 3;
  Progress progress;
  for (int trial = 0; trial < 2 * orders && !interrupted(); ++trial) {
    const std::vector<std::string> words = run_words(rung, trial % 2 == 1);
    const std::string seed = std::to_string(1 + trial / 2);
    ::setenv("FLASH_ATTENTION_EMULATOR_SEED", seed.c_str(), 1);
    progress.show(format("trial %d of %d%s", trial + 1, 2 * orders, trial < 2 ? ": compiling" : ""));
    const Finished finished = run_program(words);
    if (finished.code == ok) continue;
    progress.clear();
    std::printf(
        "%s is not repaired. This call is wrong:\n\n  FLASH_ATTENTION_KERNEL_DIR=%s FLASH_ATTENTION_EMULATOR_SEED=%s \\\n"
        "  %s\n\n%s\n%.*s\n",
        rung.file.c_str(), kernels.c_str(), seed.c_str(), typed(words).c_str(), reason(finished.output).c_str(),
        static_cast<int>(exercise.question.size()), exercise.question.data());
    return check_failed;
  }
  progress.clear();
  if (interrupted()) return interrupted_by_user;
  std::printf("%s is right: full and causal, in %d orders of threads each.%s\n", rung.file.c_str(), orders,
              text == rung.source ? "" : " It is not word for word the library's; that need not be.");
  return ok;
}

}  // namespace flash_attention::cli
