#include "api/backends.h"

#include <gtest/gtest.h>

#include "flash_attention/error.h"

namespace flash_attention {
namespace {

TEST(Backends, EachRowIsAtThePlaceOfItsKind) {
  for (std::size_t i = 0; i < api::backends().size(); ++i) {
    const Backend& backend = *api::backends()[i];
    EXPECT_EQ(static_cast<std::size_t>(backend.kind), i);
    EXPECT_EQ(&api::backend_of({.kind = backend.kind}), &backend);
    EXPECT_EQ(to_string(backend.kind), backend.name);
    EXPECT_EQ(&device_traits(backend.kind), &backend.traits);
  }
}

/// What callers ask of one field follows from another.
TEST(Backends, RowsAreWhole) {
  for (const Backend* backend : api::backends()) {
    const DeviceTraits& traits = backend->traits;
    EXPECT_NE(backend->info, nullptr) << backend->name;
    EXPECT_NE(backend->describe, nullptr) << backend->name;
    EXPECT_NE(backend->load, nullptr) << backend->name;
    EXPECT_EQ(backend->download == nullptr, traits.host_memory) << backend->name;
    EXPECT_EQ(backend->is_captured != nullptr, traits.streams) << backend->name;
    EXPECT_EQ(backend->load_plain != nullptr, traits.gpu_kernels) << backend->name;
    EXPECT_TRUE(backend->append != nullptr || backend->load_launch != nullptr) << backend->name;
    EXPECT_EQ(parse_device(backend->describe({.kind = backend->kind})).kind, backend->kind) << backend->name;
  }
}

TEST(Backends, KindsThatDoNotExistAreRefused) {
  const Device device{.kind = static_cast<DeviceKind>(7)};
  EXPECT_EQ(to_string(device), "unknown device");
  EXPECT_EQ(to_string(device.kind), "unknown device");
  try {
    device_info(device);
    FAIL();
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::invalid_argument);
    EXPECT_STREQ(error.what(), "device.kind: got 7; allowed are cpu, cuda and emulator");
  }
}

TEST(Backends, TensorsAreAlignedAsKernelsMoveThem) {
  EXPECT_EQ(api::backend_of({}).alignment(2), 2u);
  EXPECT_EQ(api::backend_of({.kind = DeviceKind::cuda}).alignment(2), 16u);
  EXPECT_EQ(api::backend_of({.kind = DeviceKind::emulator}).alignment(4), 16u);
}

}  // namespace
}  // namespace flash_attention
