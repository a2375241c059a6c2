#include "cuda/memory.h"
#include "kernels/primer.h"
#include "support/gpu.h"

namespace flash_attention::testing {
namespace {

TEST(Primer, AddsEveryElementAndNoOther) {
  REQUIRE_GPU(80);
  for (const PrimerCase& primer : primer_cases()) {
    SCOPED_TRACE(primer.entry + " " + std::to_string(primer.rows) + " x " + std::to_string(primer.columns));
    const auto kernel = load_plain_kernel(primer.unit, primer.entry, devices()[1]);
    PrimerData data(primer);
    const std::size_t bytes = data.a.size() * sizeof(float);
    cuda::DeviceMemory a(0, bytes), b(0, bytes), c(0, bytes);
    a.upload(data.a.data(), bytes);
    b.upload(data.b.data(), bytes);
    c.upload(data.c.data(), bytes);
    data.launch(*kernel, primer, a.data(), b.data(), c.data());
    c.download(data.c.data(), bytes);
    data.expect_sums();
  }
}

TEST(DeviceMemory, CopiesWithinTheGpu) {
  REQUIRE_GPU(80);
  const std::vector<unsigned char> sent{3, 1, 4, 1, 5, 9, 2, 6};
  std::vector<unsigned char> got(sent.size());
  cuda::DeviceMemory from(0, sent.size()), to(0, sent.size());
  from.upload(sent.data(), sent.size());
  to.copy_from(from);
  to.download(got.data(), got.size());
  EXPECT_EQ(got, sent);
}

}  // namespace
}  // namespace flash_attention::testing
