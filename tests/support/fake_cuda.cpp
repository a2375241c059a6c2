#include "fakes/fake_cuda.h"

#include <dlfcn.h>

#include <stdexcept>

namespace flash_attention::testing {

FakeCuda& fake_cuda() {
  void* library = ::dlopen(fake_cuda_path, RTLD_NOW | RTLD_LOCAL);
  void* get = library == nullptr ? nullptr : ::dlsym(library, "fake_cuda_state");
  if (get == nullptr) throw std::runtime_error("the stand-in for libcuda is not built");
  return *reinterpret_cast<FakeCuda* (*)()>(get)();
}

}  // namespace flash_attention::testing
