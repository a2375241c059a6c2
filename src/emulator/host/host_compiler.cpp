#include "emulator/host/host_compiler.h"

#include <fcntl.h>
#include <spawn.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <filesystem>
#include <map>
#include <sstream>
#include <string_view>
#include <vector>

#include "emulator/host/temporary_folder.h"
#include "flash_attention/error.h"
#include "jit/embedded.h"
#include "jit/sources.h"
#include "support/files.h"
#include "support/settings.h"
#include "support/sha256.h"

extern char** environ;

namespace flash_attention::emulator {
namespace {

namespace fs = std::filesystem;
constexpr std::string_view runtime_prefix = "emulator/";
constexpr std::string_view real_ptx_prefix = "ptx/";

using Sources = std::map<std::string, std::string>;

/// Files below src/emulator/runtime, by name.
Sources runtime_sources(const fs::path& kernel_dir) {
  Sources sources;
  if (kernel_dir.empty()) {
    for (const jit::EmbeddedFile& file : jit::embedded_files()) {
      if (file.name.starts_with(runtime_prefix)) sources.emplace(file.name.substr(runtime_prefix.size()), file.text);
    }
    return sources;
  }
  const fs::path root = kernel_dir.parent_path() / "src/emulator/runtime";
  std::error_code error;
  for (fs::recursive_directory_iterator it(root, error), end; !error && it != end; it.increment(error)) {
    if (const auto text = support::read_file(it->path())) {
      sources.emplace(it->path().lexically_relative(root).string(), *text);
    }
  }
  if (error) {
    throw Error(ErrorCode::invalid_argument, "FLASH_ATTENTION_KERNEL_DIR: the emulator needs " + root.string() +
                                                 " beside it, which cannot be read: " + error.message());
  }
  return sources;
}

/// The files of kernels/ that the unit includes, without those of the real instructions.
Sources kernel_sources(const std::string& text, const fs::path& kernel_dir) {
  Sources sources;
  for (jit::SourceFile& file : jit::sources_of_text(text, kernel_dir)) {
    if (!file.name.starts_with(real_ptx_prefix)) sources.emplace(std::move(file.name), std::move(file.text));
  }
  return sources;
}

std::vector<std::string> words(const std::string& text) {
  std::istringstream stream(text);
  std::vector<std::string> result;
  for (std::string word; stream >> word;) result.push_back(word);
  return result;
}

struct ProcessResult {
  int status = -1;     // exit status; -1 if it could not be started
  std::string output;  // stdout and stderr together
};

/// Runs a program (looked up in PATH) to its end. No shell.
ProcessResult run_process(const std::vector<std::string>& command) {
  ProcessResult result;
  int pipe_ends[2];
  if (command.empty() || pipe2(pipe_ends, O_CLOEXEC) != 0) return result;
  std::vector<char*> arguments;
  for (const std::string& word : command) arguments.push_back(const_cast<char*>(word.c_str()));
  arguments.push_back(nullptr);

  posix_spawn_file_actions_t actions;
  posix_spawn_file_actions_init(&actions);
  posix_spawn_file_actions_addopen(&actions, STDIN_FILENO, "/dev/null", O_RDONLY, 0);
  posix_spawn_file_actions_adddup2(&actions, pipe_ends[1], STDOUT_FILENO);
  posix_spawn_file_actions_adddup2(&actions, pipe_ends[1], STDERR_FILENO);
  pid_t child = -1;
  const int started = posix_spawnp(&child, arguments[0], &actions, nullptr, arguments.data(), environ);
  posix_spawn_file_actions_destroy(&actions);
  close(pipe_ends[1]);
  if (started == 0) {
    char buffer[4096];
    for (ssize_t got; (got = read(pipe_ends[0], buffer, sizeof buffer)) != 0;) {
      if (got > 0)
        result.output.append(buffer, static_cast<std::size_t>(got));
      else if (errno != EINTR)
        break;
    }
    int status = 0;
    while (waitpid(child, &status, 0) < 0 && errno == EINTR) {
    }
    result.status = WIFEXITED(status) ? WEXITSTATUS(status) : -1;
  }
  close(pipe_ends[0]);
  return result;
}

/// The compiler's name and version; empty if it cannot be run.
const std::string& compiler_identity() {
  static const std::string identity = [] {
    std::vector<std::string> command = words(support::settings().cxx);
    command.push_back("--version");
    const ProcessResult result = run_process(command);
    return result.status == 0 ? result.output.substr(0, result.output.find('\n')) : std::string();
  }();
  return identity;
}

bool compiles_with_clang() { return compiler_identity().find("clang") != std::string::npos; }

/// Options that make the compiler insert a call before every load and store. It does so for its address sanitizer; the
/// called functions are ours.
std::string report_every_access() {
  const std::string parameter = compiles_with_clang() ? "-mllvm -asan-" : "--param asan-";
  return "-include plain_access.h -fsanitize=kernel-address " + parameter + "instrumentation-with-call-threshold=0 " +
         parameter + "stack=0 " + parameter + "globals=0";
}

std::string digest_of(const std::string& text) { return support::to_hex(support::sha256(text)).substr(0, 16); }

void write_once(const fs::path& path, const std::string& text) {
  std::error_code error;
  if (fs::exists(path, error)) return;
  fs::create_directories(path.parent_path(), error);
  if (const auto problem = support::write_file_atomically(path, text)) {
    throw Error(ErrorCode::unavailable, "the emulator cannot write " + path.string() + ": " + *problem);
  }
}

/// Writes the sources to a folder for the compiler, and later gdb: the cache, or temporary files if the cache is not
/// writable. Returns the folder.
fs::path place_sources(const fs::path& name, const Sources& sources) {
  const fs::path cache = support::settings().cache_dir;
  const auto write_below = [&](const fs::path& base) {
    for (const auto& [file, text] : sources) write_once(base / name / file, text);
    return base / name;
  };
  if (support::prepare_private_folder(cache)) return write_below(temporary_folder());
  try {
    return write_below(cache);
  } catch (const Error&) {  // for example if the disk is full
    return write_below(temporary_folder());
  }
}

/// The folder of the job's files.
struct Placed {
  fs::path source, runtime, kernels;
  bool kept = true;  // they do not change: a folder of the cache, not a tree that is edited
};

/// The source tree itself if the settings name one, so that the debugger finds the files that are edited.
Placed place(const jit::Job& job) {
  const fs::path tree = support::settings().kernel_dir;
  std::string all;
  Sources sources;
  for (const auto& [name, text] : job.sources) {
    all += '\0' + name + '\0' + text;
    sources.emplace(name, text);
  }
  const std::string unit = job.unit.stem + "-" + digest_of(job.unit.text) + ".cpp";
  sources.emplace(unit, job.unit.text);
  const fs::path folder = place_sources(fs::path("emulator_sources") / digest_of(all), sources);
  if (tree.empty()) return {folder / unit, folder / "runtime", folder / "kernels"};
  return {folder / unit, tree.parent_path() / "src/emulator/runtime", tree, false};
}

std::vector<std::string> options_of(const jit::Unit& unit) {
  // Light optimisation compiles in a second and gdb can still follow. Most time is spent in the library anyway.
  std::vector<std::string> options{"-std=c++20",
                                   "-O1",
                                   "-g",
                                   "-w",
                                   "-Wno-psabi",
                                   "-fPIC",
                                   "-shared",
                                   "-fvisibility=hidden",
                                   "-fno-exceptions",
                                   "-fno-strict-aliasing",
                                   "-D__CUDA_ARCH__=" + std::to_string(unit.arch * 10)};
  if (!compiles_with_clang()) {
    options.push_back("--param=ggc-min-heapsize=500000");  // a sixth less time
    // another sixth: linking libstdc++ takes longer than the rest of the linking
    options.push_back("-nostdlib");
  }
  if (unit.counts_plain_accesses) {
    for (std::string& flag : words(report_every_access())) options.push_back(std::move(flag));
  }
  for (std::string& flag : words(support::settings().cxx_flags)) options.push_back(std::move(flag));
  return options;
}

std::vector<std::string> command_for(const jit::Job& job, const Placed& placed) {
  std::vector<std::string> command = words(support::settings().cxx);
  command.insert(command.end(), job.options.begin(), job.options.end());
  command.insert(command.end(), {"-I" + placed.runtime.string(), "-I" + placed.kernels.string()});
  return command;
}

/// The prelude, and the includes at the top of the unit.
std::string headers_of(const std::string& unit) {
  std::istringstream lines(unit);
  std::string headers = "#include \"prelude.h\"\n";
  for (std::string line; std::getline(lines, line);) {
    if (line.starts_with("#include \"") && line.ends_with(".cuh\"")) {  // those may be included again
      headers += line + '\n';
    } else if (!line.empty() && !line.starts_with("//")) {
      break;
    }
  }
  return headers;
}

/// The header to include first. The units of a kernel differ only in their last lines, and a third of their time is
/// spent reading the kernel. So from the fourth unit on, the kernel's header is precompiled. Only for g++: it finds
/// such a file by itself, and reads the text if the file is of another version.
std::string first_header(const jit::Job& job, const Placed& placed) {
  constexpr int worth_it = 4;
  if (!placed.kept || job.unit.counts_plain_accesses || compiles_with_clang()) return "prelude.h";
  const fs::path folder = placed.source.parent_path();
  const std::string text = headers_of(job.unit.text);
  std::string options = text + compiler_identity();
  for (const std::string& option : job.options) options += '\0' + option;
  const fs::path header = folder / ("headers-" + digest_of(options) + ".h"), compiled = header.string() + ".gch";
  std::error_code error;
  if (fs::exists(compiled, error)) return header.string();
  int units = 0;
  for (fs::directory_iterator it(folder, error), end; !error && it != end; it.increment(error)) {
    units += it->path().extension() == ".cpp";
  }
  if (units < worth_it) return "prelude.h";
  write_once(header, text);
  const fs::path unfinished = placed.source.string() + "." + std::to_string(getpid()) + ".gch";
  std::vector<std::string> command = command_for(job, placed);
  command.insert(command.end(), {"-x", "c++-header", header.string(), "-o", unfinished.string()});
  if (run_process(command).status != 0) return "prelude.h";
  fs::rename(unfinished, compiled, error);  // other processes may have made the same file
  return header.string();
}

class HostCompiler final : public jit::Compiler {
 public:
  jit::Job prepare(const jit::Unit& unit, Maker maker) const override {
    const fs::path kernel_dir = support::settings().kernel_dir;
    jit::Job job;
    job.unit = unit;
    job.unit.text += "\n#include \"epilogue.h\"\n";
    for (auto& [name, text] : runtime_sources(kernel_dir)) job.sources.push_back({"runtime/" + name, text});
    for (auto& [name, text] : kernel_sources(unit.text, kernel_dir)) job.sources.push_back({"kernels/" + name, text});
    job.options = options_of(unit);
    job.make_recipe("so", maker == Maker::anyone ? "" : compiler_identity());
    job.recipe.name += " (emulator)";
    job.recipe.stem += "-emulator";
    job.recipe.content += '\0' + kernel_dir.string();  // the object names the files for the debugger
    return job;
  }

  jit::Product compile(const jit::Job& job) const override {
    const std::string& cxx = support::settings().cxx;
    if (compiler_identity().empty()) {
      throw Error(ErrorCode::unavailable, "the emulator needs a C++ compiler: '" + cxx +
                                              "' cannot be run; install g++ 12 or set FLASH_ATTENTION_CXX");
    }
    const Placed placed = place(job);
    const fs::path output =
        temporary_folder() / (placed.source.filename().string() + "." + std::to_string(getpid()) + ".so");
    std::vector<std::string> command = command_for(job, placed);
    command.insert(command.end(), {"-include", first_header(job, placed), placed.source.string(), "-o", output.string()});
    // -nostdlib: the functions of them that a kernel calls
    if (!compiles_with_clang()) command.insert(command.end(), {"-lm", "-lgcc"});
    const ProcessResult result = run_process(command);
    if (result.status != 0)
      throw jit::compile_error(cxx, job.unit.name + " for the emulator", placed.source.string(), result.output);
    auto object = support::read_file(output);
    std::error_code error;
    fs::remove(output, error);
    if (!object) throw Error(ErrorCode::compile_failed, cxx + " left no " + output.string());
    return {std::move(*object), job.unit.text, result.output};
  }
};

}  // namespace

const jit::Compiler& host_compiler() {
  static const HostCompiler& compiler = *new HostCompiler;
  return compiler;
}

}  // namespace flash_attention::emulator
