#include "emulator/host/module.h"

#include <dlfcn.h>
#include <unistd.h>

#include <map>
#include <mutex>
#include <tuple>

#include "emulator/host/host_compiler.h"
#include "emulator/host/temporary_folder.h"
#include "emulator/instructions/table.h"
#include "flash_attention/error.h"

namespace flash_attention::emulator {
namespace {

/// Writes a file for dlopen, for an object that no cache keeps.
std::string write_temporary(const std::string& object) {
  std::string path = (temporary_folder() / "module_XXXXXX").string();
  const int file = mkstemp(path.data());
  const bool written = file >= 0 && write(file, object.data(), object.size()) == static_cast<ssize_t>(object.size());
  if (file >= 0) close(file);
  if (!written) throw Error(ErrorCode::unavailable, "the emulator cannot write " + path);
  return path;
}

template <typename Function>
Function symbol(void* handle, const char* name) {
  void* address = dlsym(handle, name);
  if (address == nullptr) throw Error(ErrorCode::internal, std::string("an emulated unit lacks ") + name);
  return reinterpret_cast<Function>(address);
}

std::shared_ptr<const Module> load(const jit::Unit& unit) {
  const jit::Artifact artifact = jit::build(host_compiler(), unit);
  const std::string path = artifact.path.empty() ? write_temporary(artifact.payload) : artifact.path.string();
  void* handle = dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL);
  const char* problem = handle == nullptr ? dlerror() : nullptr;
  if (artifact.path.empty()) unlink(path.c_str());
  if (handle == nullptr) throw Error(ErrorCode::internal, "cannot load " + unit.name + " for the emulator: " + problem);
  auto module = std::make_shared<Module>();
  module->name = unit.name;
  module->entry.run = symbol<void (*)(const void*)>(handle, "flash_attention_run");
  module->entry.thread_slot = symbol<const ThreadView** (*)()>(handle, "flash_attention_thread_slot");
  symbol<void (*)(const Table*)>(handle, "flash_attention_set_table")(&runtime_table());
  return module;
}

}  // namespace

std::shared_ptr<const Module> load_module(const jit::Unit& unit) {
  struct Slot {
    std::mutex mutex;
    std::shared_ptr<const Module> module;
  };
  static std::mutex mutex;
  static std::map<std::tuple<std::string, int, bool>, Slot> slots;
  Slot& slot = [&]() -> Slot& {
    const std::lock_guard lock(mutex);
    return slots[{unit.text, unit.arch, unit.counts_plain_accesses}];
  }();
  const std::lock_guard lock(slot.mutex);  // other units are compiled meanwhile
  if (slot.module == nullptr) slot.module = load(unit);
  return slot.module;
}

}  // namespace flash_attention::emulator
