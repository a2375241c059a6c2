#pragma once

#include <gtest/gtest.h>
#include <stdlib.h>

#include <algorithm>
#include <functional>
#include <string>

#include "fakes/fake_cuda.h"
#include "flash_attention/error.h"

namespace flash_attention::testing {

/// Points the process at the stand-ins before anything reads the settings.
inline const bool environment_is_fake = [] {
  ::setenv("FLASH_ATTENTION_DRIVER", fake_cuda_path, 1);
  ::setenv("FLASH_ATTENTION_NVRTC", FLASH_ATTENTION_FAKES "/libfake_nvrtc_13.so", 1);
  ::setenv("FLASH_ATTENTION_CACHE_LIMIT", "0", 1);
  return true;
}();

/// A test that begins with a driver nobody has used.
class FakeCudaTest : public ::testing::Test {
 protected:
  FakeCudaTest() : cu(fake_cuda()) { cu = FakeCuda{}; }

  std::ptrdiff_t times_called(const char* name) const { return std::ranges::count(cu.calls, name); }

  FakeCuda& cu;
};

/// The text of the error that the body must end with.
inline std::string error_of(ErrorCode code, const std::function<void()>& body) {
  try {
    body();
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), code) << error.what();
    return error.what();
  }
  ADD_FAILURE() << "no error";
  return {};
}

inline void* fake_stream(int device) { return reinterpret_cast<void*>(fake_stream_of(device)); }
inline void* fake_context(int device) {
  return reinterpret_cast<void*>(std::uintptr_t{0x10} * static_cast<std::uintptr_t>(device + 1));
}

}  // namespace flash_attention::testing
