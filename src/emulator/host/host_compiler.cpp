#include "emulator/host/host_compiler.h"

#include <algorithm>
#include <filesystem>
#include <map>
#include <sstream>
#include <string_view>
#include <vector>

#include "emulator/host/process.h"
#include "emulator/host/temporary_folder.h"
#include "flash_attention/error.h"
#include "jit/cached.h"
#include "jit/embedded.h"
#include "jit/sources.h"
#include "support/files.h"
#include "support/settings.h"
#include "support/sha256.h"

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

/// What the unit includes of kernels/, but for the real instructions.
Sources kernel_sources(const std::string& text, const fs::path& kernel_dir) {
  Sources sources;
  constexpr std::string_view directive = "#include \"";
  for (std::size_t at = text.find(directive); at != std::string::npos; at = text.find(directive, at)) {
    at += directive.size();
    const std::string name = text.substr(at, text.find('"', at) - at);
    for (jit::SourceFile& file : jit::sources_of(name, kernel_dir)) {
      if (!file.name.starts_with(real_ptx_prefix)) sources.emplace(std::move(file.name), std::move(file.text));
    }
  }
  return sources;
}

std::vector<std::string> words(const std::string& text) {
  std::istringstream stream(text);
  std::vector<std::string> result;
  for (std::string word; stream >> word;) result.push_back(word);
  return result;
}

/// The compiler's name and version; empty where it cannot be run.
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

/// Makes the compiler put a call before every load and store. It does so for its address sanitizer; the functions it calls
/// are ours.
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

/// Puts the sources where the compiler, and later gdb, finds them: into the cache, or beside other temporary files where it
/// cannot be written. Returns the folder.
fs::path place_sources(const fs::path& name, const Sources& sources) {
  const fs::path cache = support::settings().cache_dir;
  const auto write_below = [&](const fs::path& base) {
    for (const auto& [file, text] : sources) write_once(base / name / file, text);
    return base / name;
  };
  if (support::prepare_private_folder(cache)) return write_below(temporary_folder());
  try {
    return write_below(cache);
  } catch (const Error&) {  // the disk is full, say
    return write_below(temporary_folder());
  }
}

jit::Product run_compiler(const HostUnit& unit, const std::string& text, const Sources& runtime, const Sources& kernels,
                          const std::vector<std::string>& options) {
  const support::Settings& settings = support::settings();
  if (compiler_identity().empty()) {
    throw Error(ErrorCode::unavailable, "the emulator needs a C++ compiler: '" + settings.cxx +
                                            "' cannot be run; install g++ 12 or set FLASH_ATTENTION_CXX");
  }
  std::string all;
  Sources sources;
  for (const auto& [room, files] : {std::pair{"runtime/", &runtime}, {"kernels/", &kernels}}) {
    for (const auto& [name, file] : *files) {
      all += '\0' + name + '\0' + file;
      sources.emplace(room + name, file);
    }
  }
  const std::string unit_name = unit.stem + "-" + digest_of(text) + ".cpp";
  sources.emplace(unit_name, text);
  const fs::path folder = place_sources(fs::path("emulator_sources") / digest_of(all), sources);
  const fs::path source = folder / unit_name;
  const fs::path output = temporary_folder() / (unit_name + "." + std::to_string(process_id()) + ".so");
  std::vector<std::string> command = words(settings.cxx);
  command.insert(command.end(), options.begin(), options.end());
  const bool from_tree = !settings.kernel_dir.empty();
  const fs::path runtime_dir = from_tree ? settings.kernel_dir.parent_path() / "src/emulator/runtime" : folder / "runtime";
  const fs::path kernels_dir = from_tree ? settings.kernel_dir : folder / "kernels";
  for (const std::string& word : {"-I" + runtime_dir.string(), "-I" + kernels_dir.string(), std::string("-include"),
                                  std::string("prelude.h"), source.string(), std::string("-o"), output.string()}) {
    command.push_back(word);
  }
  if (!compiles_with_clang()) command.insert(command.end(), {"-lm", "-lgcc"});  // -nostdlib: what a kernel calls of them
  const ProcessResult result = run_process(command);
  if (result.status != 0) {
    throw Error(ErrorCode::compile_failed, settings.cxx + " could not compile " + unit.name +
                                               " for the emulator\nsource: " + source.string() + "\n" + result.output);
  }
  auto object = support::read_file(output);
  std::error_code error;
  fs::remove(output, error);
  if (!object) throw Error(ErrorCode::compile_failed, settings.cxx + " left no " + output.string());
  return {std::move(*object), text, result.output};
}

}  // namespace

jit::Artifact compile_for_host(const HostUnit& unit) {
  const support::Settings& settings = support::settings();
  const std::string text = unit.text + "\n#include \"epilogue.h\"\n";
  const Sources runtime = runtime_sources(settings.kernel_dir);
  const Sources kernels = kernel_sources(unit.text, settings.kernel_dir);
  // Light optimisation compiles in a second and lets gdb follow; the time goes into the library's part anyway.
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
    options.push_back("-nostdlib");                        // another: to link libstdc++ takes longer than all else of it
  }
  if (unit.counts_plain_accesses) {
    for (std::string& flag : words(report_every_access())) options.push_back(std::move(flag));
  }
  for (std::string& flag : words(settings.cxx_flags)) options.push_back(std::move(flag));

  jit::Recipe recipe{unit.name + " (emulator)", unit.stem + "-emulator", "so", text, compiler_identity()};
  for (const std::string& option : options) recipe.content += '\0' + option;
  recipe.content += '\0' + settings.kernel_dir.string();  // the debugger is to find the files that are edited
  for (const Sources* sources : {&runtime, &kernels}) {
    for (const auto& [name, source] : *sources) recipe.content += '\0' + name + '\0' + source;
  }
  return jit::product_cache().get(recipe, [&] { return run_compiler(unit, text, runtime, kernels, options); });
}

}  // namespace flash_attention::emulator
