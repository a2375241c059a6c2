#include "cuda/backend.h"
#include "cuda/context.h"
#include "cuda/fake_environment.h"
#include "flash_attention/error.h"

namespace flash_attention::cuda {
namespace {

using testing::fake_context;
using testing::fake_stream;
using testing::FakeCudaTest;

class OldDriverTest : public FakeCudaTest {};

TEST_F(OldDriverTest, before_12_8_the_gpu_of_a_stream_is_found_through_its_context) {
  cu.stream_get_device = false;  // before the driver is opened for the first time
  const Driver& old = driver();
  ASSERT_EQ(old.StreamGetDevice, nullptr);
  cu.contexts = {fake_context(0)};
  EXPECT_EQ(device_of(old, static_cast<Stream>(fake_stream(1))), 1);
  EXPECT_EQ(cu.contexts, std::vector<void*>{fake_context(0)});
}

}  // namespace
}  // namespace flash_attention::cuda
