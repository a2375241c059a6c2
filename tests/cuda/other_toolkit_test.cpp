// Kernels made ahead of time by a toolkit that is newer than the driver.
#include "cuda/backend.h"
#include "cuda/fake_environment.h"
#include "flash_attention/runtime.h"
#include "jit/compile.h"
#include "jit/nvrtc/nvrtc_compiler.h"
#include "jit/store.h"
#include "support/folder.h"

namespace flash_attention::cuda {
namespace {

using testing::FakeCudaTest;

class OtherToolkitTest : public FakeCudaTest {};

constexpr char made_elsewhere[] = "by a newer toolkit";

/// A launch of a kernel that the library has.
Plan one_launch(const std::string& config) {
  Plan plan;
  plan.kernel = "forward/portable";
  plan.launches = {{.unit = "forward/portable", .entry = "first", .config = config, .grid = {7, 2, 3}, .block = 256}};
  return plan;
}

TEST_F(OtherToolkitTest, what_the_driver_does_not_take_is_compiled_here) {
  const testing::TemporaryFolder folder;
  ::setenv("FLASH_ATTENTION_AOT_DIR", (folder / "ahead").c_str(), 1);  // before the settings are read for the first time
  const jit::Store ahead(folder / "ahead", jit::Store::Access::read_write, 1 << 20);
  const Plan plan = one_launch("of another toolkit");
  for (const jit::KernelKey& key : jit::make_keys(plan, 90)) {
    const auto job = jit::nvrtc_compiler().prepare(jit::unit_of(key), jit::Compiler::Maker::anyone);
    ASSERT_FALSE(ahead.keep(job.recipe, {made_elsewhere, "source", "notes"}).empty());
  }
  DeviceInfo info;
  info.device = {DeviceKind::cuda, 0, 0};
  info.arch = 90;

  cu.too_new = made_elsewhere;
  std::string said;
  set_log_callback([](std::string_view text, void* context) { static_cast<std::string*>(context)->append(text); }, &said);
  const auto kernel = load_kernel(plan, info, testing::fake_stream(0));
  set_log_callback(nullptr, nullptr);
  ASSERT_EQ(cu.loaded.size(), 1u);
  EXPECT_NE(cu.loaded.front(), made_elsewhere);
  EXPECT_NE(said.find("is not for this driver; it was compiled here"), std::string::npos) << said;
  EXPECT_FALSE(jit::compiled(jit::make_keys(plan, 90).front())->ahead_of_time) << "other GPUs load that one, too";
}

}  // namespace
}  // namespace flash_attention::cuda
