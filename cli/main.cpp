#include <algorithm>
#include <cstdio>
#include <string>
#include <string_view>

#include "cli/output/terminal.h"
#include "cli/verb.h"
#include "flash_attention/error.h"
#include "flash_attention/runtime.h"
#include "flash_attention/version.h"

namespace flash_attention::cli {
namespace {

const Verb* const verbs[] = {&run_verb,     &bench_verb,  &tune_verb,   &plan_verb,    &doctor_verb,
                             &compile_verb, &cache_verb,  &primer_verb, &ladder_verb,  &profile_verb,
                             &trace_verb,   &report_verb, &stress_verb, &generate_verb};

void print_overview(std::FILE* file) {
  std::fprintf(file, "flash-attention %s: exact attention in O(seq) memory.\n\nVerbs:\n", FLASH_ATTENTION_VERSION);
  for (const Verb* verb : verbs) {
    std::fprintf(file, "  %-10s %s\n", std::string(verb->name).c_str(), std::string(verb->summary).c_str());
  }
  std::fputs(
      "\nFirst steps:\n"
      "  flash-attention doctor                                  what is here, and does it work\n"
      "  flash-attention run --seq-q 4096 --seq-kv 4096 --causal one problem: kernel, time, error\n"
      "  flash-attention bench                                   flash against standard attention, by length\n"
      "  flash-attention tune                                    measure tiles and kernels here, keep the fastest\n"
      "  flash-attention ladder                                  from a naive kernel to a fast one, step by step\n"
      "  flash-attention VERB --help                             what a verb does, and its flags\n"
      "\nExit codes: 0 good, 1 a check failed, 2 a request that cannot be served, 3 device or compiler missing,\n"
      "4 out of memory, 5 a kernel does not compile, 6 the device failed, 7 a bug of this library, 8 the output\n"
      "could not be written, 130 interrupted.\n",
      file);
}

void print_help(const Verb& verb) {
  std::printf("flash-attention %s: %s\n\n%s\nFlags:\n%s", std::string(verb.name).c_str(), std::string(verb.summary).c_str(),
              std::string(verb.about).c_str(), describe(verb.flags).c_str());
}

int exit_code(ErrorCode code) {
  return code == ErrorCode::invalid_argument || code == ErrorCode::unsupported ? static_cast<int>(bad_usage)
                                                                               : static_cast<int>(code);
}

/// What the library has to say (a compilation that takes long, a healed cache file) is for people, not for scripts.
void show_log(std::string_view message, void*) {
  if (on_terminal()) std::fprintf(stderr, "\r\033[K%.*s\n", static_cast<int>(message.size()), message.data());
}

/// The command's result is what it printed: if that is lost (a full disk), it has failed.
int after_writing(int code) {
  if (std::fflush(stdout) == 0 && std::ferror(stdout) == 0) return code;
  std::fputs("flash-attention: the output could not be written; is the disk full?\n", stderr);
  return code == ok ? static_cast<int>(output_lost) : code;
}

bool asks_for_help(std::string_view word) { return word == "--help" || word == "-h" || word == "help"; }

int dispatch(int count, char** texts) {
  const bool helps_with_verb = count > 2 && std::string_view(texts[1]) == "help";
  if (count < 2 || (asks_for_help(texts[1]) && !helps_with_verb)) {
    print_overview(count < 2 ? stderr : stdout);
    return count < 2 ? bad_usage : ok;
  }
  const std::string_view name = texts[helps_with_verb ? 2 : 1];
  if (name == "--version") {
    std::puts(FLASH_ATTENTION_VERSION);
    return ok;
  }
  std::vector<std::string_view> names;
  for (const Verb* verb : verbs) {
    names.push_back(verb->name);
    if (verb->name != name) continue;
    if (helps_with_verb || std::any_of(texts + 2, texts + count, asks_for_help)) {
      print_help(*verb);
      return ok;
    }
    return verb->run(Arguments(verb->flags, verb->max_words, count - 2, texts + 2));
  }
  throw Error(ErrorCode::invalid_argument, "unknown verb '" + std::string(name) + "'" + suggestion(name, names) +
                                               "; flash-attention --help lists the verbs");
}

}  // namespace

std::span<const Verb* const> all_verbs() { return verbs; }

}  // namespace flash_attention::cli

int main(int count, char** texts) {
  using namespace flash_attention;
  cli::catch_interrupts();
  set_log_callback(cli::show_log, nullptr);
  try {
    return cli::after_writing(cli::dispatch(count, texts));
  } catch (const Error& error) {
    std::fprintf(stderr, "flash-attention: %s\n", error.what());
    return cli::exit_code(error.code());
  } catch (const std::bad_alloc&) {
    std::fputs("flash-attention: out of memory\n", stderr);
    return static_cast<int>(ErrorCode::out_of_memory);
  } catch (const std::exception& error) {
    std::fprintf(stderr, "flash-attention: unexpected: %s\n", error.what());
    return static_cast<int>(ErrorCode::internal);
  }
}
