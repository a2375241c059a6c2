#include "cuda/backend.h"
#include "cuda/driver.h"
#include "cuda/fake_environment.h"
#include "flash_attention/error.h"

namespace flash_attention::cuda {
namespace {

using testing::error_of;
using testing::FakeCudaTest;

class DriverRetryTest : public FakeCudaTest {};

TEST_F(DriverRetryTest, a_gpu_that_comes_later_is_found) {
  cu.failures["cuInit"] = 100;  // before the driver is opened for the first time
  for (int attempt = 0; attempt < 2; ++attempt) {
    EXPECT_NE(error_of(ErrorCode::unavailable, [] { info(0); }).find("cuInit"), std::string::npos);
    EXPECT_TRUE(devices().empty());
  }
  cu.failures.clear();
  EXPECT_EQ(devices().size(), 2u);
  EXPECT_EQ(&driver(), &driver());
  const auto before = times_called("cuInit");
  driver();
  EXPECT_EQ(times_called("cuInit"), before) << "what has been opened is kept";
}

}  // namespace
}  // namespace flash_attention::cuda
