#include <gtest/gtest.h>

#include "cuda/context.h"
#include "cuda/memory.h"
#include "cuda/tensor_map.h"
#include "emulator/compare.h"
#include "emulator/emulate.h"
#include "emulator/nvrtc.h"
#include "emulator/wrapper_cases.h"
#include "support/gpu.h"

// The wrappers' cases on the hardware: the same kernels, the same bits. What passes here and in wrappers_emulated_test is
// emulated truly.
namespace flash_attention::testing {
namespace {

using Wrapper = ::testing::TestWithParam<WrapperCase>;

TEST_P(Wrapper, GivesTheSameBitsOnTheGpu) {
  const WrapperCase& c = GetParam();
  REQUIRE_GPU(c.arch);
  const cuda::Driver& cu = cuda::driver();
  const cuda::ContextScope scope(cu, 0, nullptr);
  const auto compiled = compile_with_nvrtc(c, devices()[1].arch);
  ASSERT_TRUE(compiled.ok) << compiled.log;
  cuda::Library library = nullptr;
  ASSERT_EQ(cu.LibraryLoadData(&library, compiled.binary.data(), nullptr, nullptr, 0, nullptr, nullptr, 0), 0);
  cuda::Function function = nullptr;
  ASSERT_EQ(cu.LibraryGetKernel(&function, library, "kernel"), 0);

  cuda::DeviceMemory input(0, c.input.size() + 1024), output(0, c.expected.size() + 1024);
  if (!c.input.empty()) input.upload(c.input.data(), c.input.size());
  const Bytes before = c.before.empty() ? Bytes(c.expected.size()) : c.before;
  output.upload(before.data(), before.size());
  WrapperArgs args{{}, static_cast<const unsigned char*>(input.data()), static_cast<unsigned char*>(output.data())};
  for (const WrapperCase::Map& map : c.maps) {
    launch::TensorMapSpec spec = map.spec;
    spec.data =
        static_cast<unsigned char*>((map.of_output ? output : input).data()) + reinterpret_cast<std::uintptr_t>(spec.data);
    args.maps[spec.slot] = cuda::tensor_map(cu, spec);
  }
  cuda::LaunchAttribute cluster{
      cuda::LaunchAttribute::cluster_dimension, 0, {{static_cast<unsigned>(c.shape.cluster), 1, 1}}};
  cuda::LaunchConfig config{.grid = {c.shape.grid.x, c.shape.grid.y, c.shape.grid.z},
                            .block = {static_cast<unsigned>(c.shape.block), 1, 1}};
  if (!c.storage.empty()) config.shared_bytes = shared_bytes_of_a_case;
  if (c.shape.cluster > 1) {
    config.attributes = &cluster;
    config.num_attributes = 1;
  }
  void* parameters[] = {&args};
  ASSERT_EQ(cu.LaunchKernelEx(&config, function, parameters, nullptr), 0);
  cuda::synchronize(0);
  Bytes got(c.expected.size());
  output.download(got.data(), got.size());
  expect_output(c, got);
  cu.LibraryUnload(library);
}

INSTANTIATE_TEST_SUITE_P(Gpu, Wrapper, ::testing::ValuesIn(wrapper_cases()),
                         [](const auto& parameter) { return parameter.param.name; });

}  // namespace
}  // namespace flash_attention::testing
