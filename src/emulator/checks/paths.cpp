#include "emulator/checks/paths.h"

#include <mutex>

namespace flash_attention::emulator {
namespace {

struct Paths {
  std::mutex mutex;
  std::set<std::string> names;
};

Paths& paths() {
  static Paths instance;
  return instance;
}

}  // namespace

std::set<std::string> paths_taken() {
  const std::lock_guard lock(paths().mutex);
  return paths().names;
}

void take_path(const char* name) {
  const std::lock_guard lock(paths().mutex);
  paths().names.emplace(name);
}

}  // namespace flash_attention::emulator
