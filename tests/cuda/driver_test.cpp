#include "cuda/driver.h"

#include <algorithm>

#include "cuda/backend.h"
#include "cuda/fake_environment.h"
#include "cuda/memory.h"
#include "cuda/tensor_map.h"
#include "flash_attention/error.h"

namespace flash_attention::cuda {
namespace {

using testing::error_of;
using testing::fake_cuda_path;
using testing::FakeCudaTest;

void expect_contains(const std::string& text, std::initializer_list<const char*> parts) {
  for (const char* part : parts) EXPECT_NE(text.find(part), std::string::npos) << "'" << part << "' is not in: " << text;
}

class DriverTest : public FakeCudaTest {};

TEST_F(DriverTest, no_driver) {
  const auto text = error_of(ErrorCode::unavailable, [] { open_driver("/nowhere/libcuda.so.1"); });
  expect_contains(text, {"there is no NVIDIA driver here", "/nowhere/libcuda.so.1", "install the NVIDIA driver"});
}

TEST_F(DriverTest, a_library_that_is_no_driver) {
  const auto text = error_of(ErrorCode::unavailable, [] { open_driver(FLASH_ATTENTION_FAKES "/libfake_nvrtc_13.so"); });
  expect_contains(text, {"too old", "driver 525"});
}

TEST_F(DriverTest, a_driver_that_is_too_old) {
  cu.version = 11080;
  expect_contains(error_of(ErrorCode::unavailable, [] { open_driver(fake_cuda_path); }), {"CUDA 11.8", "12.0", "update"});
}

TEST_F(DriverTest, no_gpu) {
  cu.failures["cuInit"] = 100;
  expect_contains(error_of(ErrorCode::unavailable, [] { open_driver(fake_cuda_path); }),
                  {"cuInit", "(100)", "CUDA_VISIBLE_DEVICES"});
}

TEST_F(DriverTest, devices) {
  const auto gpus = devices();
  ASSERT_EQ(gpus.size(), 2u);
  EXPECT_EQ(gpus[1].device, (Device{DeviceKind::cuda, 1, 0}));
  EXPECT_EQ(gpus[1].name, "Fake GPU");
  EXPECT_EQ(gpus[1].arch, 90);
  EXPECT_EQ(gpus[1].num_sms, 132);
  EXPECT_EQ(gpus[1].shared_bytes, 227 << 10);
  EXPECT_EQ(gpus[1].l2_bytes, 50 << 20);
  EXPECT_EQ(gpus[1].memory_bytes, std::int64_t{80} << 30);
  EXPECT_EQ(info(1), gpus[1]);
}

TEST_F(DriverTest, a_device_that_does_not_exist) {
  for (const int index : {-1, 2}) {
    const auto text = error_of(ErrorCode::unavailable, [&] { info(index); });
    expect_contains(text, {("cuda:" + std::to_string(index)).c_str(), "sees 2 GPU(s)", "CUDA_VISIBLE_DEVICES"});
  }
}

TEST_F(DriverTest, devices_without_end_are_none) {
  cu.failures["cuDeviceGetCount"] = 3;
  EXPECT_TRUE(devices().empty());
  expect_contains(error_of(ErrorCode::unavailable, [] { info(0); }), {"cuDeviceGetCount", "spawn"});
}

TEST_F(DriverTest, diagnosis) {
  const auto findings = diagnose();
  ASSERT_EQ(findings.size(), 3u);
  EXPECT_TRUE(findings[0].ok);
  expect_contains(findings[0].detail, {"CUDA 13.0"});
  expect_contains(findings[2].detail, {"Fake GPU", "sm_90", "132 SMs"});
  cu.failures["cuDeviceGetCount"] = 3;
  EXPECT_FALSE(diagnose().back().ok);
}

TEST_F(DriverTest, memory_comes_and_goes) {
  {
    DeviceMemory memory(1, 1000);
    const std::string sent = "twelve bytes";
    memory.upload(sent.data(), sent.size(), 100);
    std::string got(sent.size(), ' ');
    memory.download(got.data(), got.size(), 100);
    EXPECT_EQ(got, sent);
    memory.fill('x');
    memory.download(got.data(), got.size(), 100);
    EXPECT_EQ(got, std::string(sent.size(), 'x'));
    DeviceMemory moved = std::move(memory);
    EXPECT_EQ(memory.data(), nullptr);
    EXPECT_EQ(moved.size(), 1000u);
  }
  EXPECT_EQ(times_called("cuMemFree"), 1);
  EXPECT_TRUE(cu.contexts.empty()) << "the caller had no context and has none";
}

TEST_F(DriverTest, no_memory_left) {
  cu.failures["cuMemAlloc"] = 2;
  const auto text = error_of(ErrorCode::out_of_memory, [] { DeviceMemory(0, 123456); });
  expect_contains(text, {"cuda:0", "123456 bytes", "1000 of 2000 are free"});
}

TEST_F(DriverTest, what_failed_on_the_gpu_is_reported_by_synchronize) {
  cu.failures["cuStreamSynchronize"] = 700;
  expect_contains(error_of(ErrorCode::device_failed, [] { synchronize(0); }),
                  {"cuStreamSynchronize", "(700)", "compute-sanitizer"});
}

TEST_F(DriverTest, tensor_maps) {
  launch::TensorMapSpec spec{.slot = 2, .data = reinterpret_cast<void*>(0x7000), .dtype = Dtype::bfloat16, .rank = 3};
  spec.sizes[0] = 128, spec.sizes[1] = 4096, spec.sizes[2] = 8;
  spec.strides_bytes[0] = 256, spec.strides_bytes[1] = 1 << 20;
  spec.box[0] = 64, spec.box[1] = 128, spec.box[2] = 1;
  spec.swizzle_bytes = 128;
  const abi::TensorMap map = tensor_map(driver(), spec);
  // The stand-in writes: type, rank, address, first size, first stride, first two box sizes, swizzle.
  const unsigned long long expected[] = {9, 3, 0x7000, 128, 256, 64, 128, 3};
  for (int i = 0; i < 8; ++i) EXPECT_EQ(map.words[i], expected[i]) << i;
  spec.slot = 3;
  cu.failures["cuTensorMapEncodeTiled"] = 1;
  expect_contains(error_of(ErrorCode::internal, [&] { tensor_map(driver(), spec); }),
                  {"slot 3", "4096 elements in boxes of 128", "stride 256 bytes", "swizzle 128"});
}

TEST_F(DriverTest, a_tensor_map_is_asked_for_once) {
  const auto asked = [&] { return std::ranges::count(cu.calls, "cuTensorMapEncodeTiled"); };
  launch::TensorMapSpec spec{.data = reinterpret_cast<void*>(0x9000), .rank = 2};
  spec.sizes[0] = 64, spec.sizes[1] = 100;
  for (int i = 0; i < 3; ++i) tensor_map(driver(), spec);
  EXPECT_EQ(asked(), 1);
  // Whatever differs makes another map, and enough others take the first one's place.
  for (std::uint64_t rows = 101; rows < 105; ++rows) {
    spec.sizes[1] = rows;
    tensor_map(driver(), spec);
  }
  for (std::uintptr_t i = 1; i <= 1000; ++i) {
    spec.data = reinterpret_cast<void*>(0x9000 + 0x100 * i);
    EXPECT_EQ(tensor_map(driver(), spec).words[2], 0x9000 + 0x100 * i);
  }
  EXPECT_EQ(asked(), 1 + 4 + 1000);
}

}  // namespace
}  // namespace flash_attention::cuda
