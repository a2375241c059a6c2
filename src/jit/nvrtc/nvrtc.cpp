#include "jit/nvrtc/nvrtc.h"

#include <dlfcn.h>

#include <algorithm>
#include <atomic>
#include <mutex>

#include "flash_attention/error.h"

namespace flash_attention::jit {
namespace {

namespace fs = std::filesystem;

constexpr int oldest_major = 12;  // the first version with C++20 and sm_90a

template <typename Function>
bool bind(void* library, const char* name, Function*& function) {
  function = reinterpret_cast<Function*>(::dlsym(library, name));
  return function != nullptr;
}

/// NVRTC opens its built-in functions by name only, which fails outside the loader's path. So they are opened by path
/// before.
void open_builtins(const fs::path& folder, int major) {
  const std::string beginning = "libnvrtc-builtins.so." + std::to_string(major);
  std::error_code error;
  for (fs::directory_iterator it(folder, error), end; !error && it != end; it.increment(error)) {
    if (it->path().filename().string().starts_with(beginning)) ::dlopen(it->path().c_str(), RTLD_NOW | RTLD_LOCAL);
  }
}

}  // namespace

/// Returns why the place cannot be used; empty on success.
std::string Nvrtc::open(const NvrtcPlace& place) {
  if (!place.missing.empty()) return place.missing;
  void* library = ::dlopen(place.library.c_str(), RTLD_NOW | RTLD_LOCAL);
  if (library == nullptr) return ::dlerror();
  const bool complete =
      bind(library, "nvrtcVersion", call_.version) && bind(library, "nvrtcGetNumSupportedArchs", call_.num_archs) &&
      bind(library, "nvrtcGetSupportedArchs", call_.archs) && bind(library, "nvrtcCreateProgram", call_.create) &&
      bind(library, "nvrtcDestroyProgram", call_.destroy) && bind(library, "nvrtcCompileProgram", call_.compile) &&
      bind(library, "nvrtcGetProgramLogSize", call_.log_size) && bind(library, "nvrtcGetProgramLog", call_.log) &&
      bind(library, "nvrtcGetCUBINSize", call_.cubin_size) && bind(library, "nvrtcGetCUBIN", call_.cubin) &&
      bind(library, "nvrtcGetPTXSize", call_.ptx_size) && bind(library, "nvrtcGetPTX", call_.ptx) &&
      bind(library, "nvrtcGetErrorString", call_.error_string);
  if (!complete || call_.version(&major_, &minor_) != 0) return place.library.string() + " is not NVRTC 12.0 or later";
  const std::string version = std::to_string(major_) + "." + std::to_string(minor_);
  if (major_ < oldest_major) return place.library.string() + " is NVRTC " + version + "; 12.0 or later is needed";

  Dl_info found;
  path_ = ::dladdr(reinterpret_cast<const void*>(call_.version), &found) != 0 ? fs::path(found.dli_fname) : place.library;
  if (path_.is_absolute()) open_builtins(path_.parent_path(), major_);
  std::error_code error;
  const auto bytes = fs::file_size(path_, error);
  identity_ = "nvrtc " + version + (error ? "" : ", " + std::to_string(bytes) + " bytes");
  origin_ = place.origin;
  int count = 0;
  if (call_.num_archs(&count) != 0 || count <= 0) return path_.string() + " supports no architecture";
  archs_.resize(static_cast<std::size_t>(count));
  if (call_.archs(archs_.data()) != 0) return path_.string() + " does not say which architectures it supports";
  std::ranges::sort(archs_);
  return {};
}

Nvrtc::Nvrtc(const std::vector<NvrtcPlace>& places) {
  std::string misses;
  for (const NvrtcPlace& place : places) {
    const std::string reason = open(place);
    if (reason.empty()) return;
    misses += "\n  " + place.origin + ": " + reason;
  }
  throw Error(ErrorCode::unavailable,
              "NVRTC, which compiles the GPU kernels, was not found. It comes with PyTorch for CUDA and with `pip install "
              "nvidia-cuda-nvrtc`; or set FLASH_ATTENTION_NVRTC to the library. Tried:" +
                  misses);
}

const Nvrtc& Nvrtc::instance() {
  // A failure is not remembered: the caller may import PyTorch, or install a wheel, and try again. The search takes
  // less than a millisecond, and only calls that have a kernel to compile search.
  static std::atomic<const Nvrtc*> found = nullptr;
  if (const Nvrtc* compiler = found.load(std::memory_order_acquire)) return *compiler;
  static std::mutex mutex;
  const std::lock_guard lock(mutex);
  if (const Nvrtc* compiler = found.load(std::memory_order_relaxed)) return *compiler;
  const auto* compiler = new Nvrtc(nvrtc_places(support::settings(), surroundings()));  // never destroyed
  found.store(compiler, std::memory_order_release);
  return *compiler;
}

Nvrtc::Result Nvrtc::compile(const std::string& source, const std::string& name, const std::vector<SourceFile>& headers,
                             const std::vector<std::string>& options) const {
  std::vector<const char*> texts, names, flags;
  bool virtual_arch = false;
  for (const SourceFile& header : headers) texts.push_back(header.text.c_str()), names.push_back(header.name.c_str());
  for (const std::string& option : options) {
    flags.push_back(option.c_str());
    virtual_arch |= option.starts_with("--gpu-architecture=compute_");
  }
  void* program = nullptr;
  int status =
      call_.create(&program, source.c_str(), name.c_str(), static_cast<int>(texts.size()), texts.data(), names.data());
  if (status != 0) return {false, {}, std::string("nvrtcCreateProgram: ") + call_.error_string(status)};
  status = call_.compile(program, static_cast<int>(flags.size()), flags.data());

  Result result{status == 0, {}, {}};
  const auto fetch = [&](int (*size_of)(void*, std::size_t*), int (*get)(void*, char*)) {
    std::size_t size = 0;
    std::string bytes;
    if (size_of(program, &size) != 0 || size == 0) return bytes;
    bytes.resize(size);
    if (get(program, bytes.data()) != 0) bytes.clear();
    return bytes;
  };
  result.log = fetch(call_.log_size, call_.log);
  while (!result.log.empty() && result.log.back() == '\0') result.log.pop_back();
  if (result.ok) {
    result.binary = virtual_arch ? fetch(call_.ptx_size, call_.ptx) : fetch(call_.cubin_size, call_.cubin);
    result.ok = !result.binary.empty();
  } else {
    result.log = std::string("nvrtcCompileProgram: ") + call_.error_string(status) + "\n" + result.log;
  }
  call_.destroy(&program);
  return result;
}

}  // namespace flash_attention::jit
