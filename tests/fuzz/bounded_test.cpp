// A bounded run of the fuzz targets with random bytes, for every compiler; call_fuzzer.cpp lets libFuzzer choose the bytes.
#include <random>
#include <vector>

#include "fuzz/small_case.h"
#include "fuzz/wild_call.h"

namespace flash_attention::fuzz {
namespace {

std::vector<std::uint8_t> random_bytes(std::uint32_t seed) {
  std::mt19937 random(seed);
  std::vector<std::uint8_t> bytes(400);
  for (std::uint8_t& byte : bytes) byte = static_cast<std::uint8_t>(random());
  return bytes;
}

TEST(Fuzz, AnyProblemIsPlannedOrRefused) {
  int planned = 0;
  for (std::uint32_t seed = 0; seed < 5000 && !HasFailure(); ++seed) {
    const std::vector<std::uint8_t> bytes = random_bytes(seed);
    planned += plan_wildly(bytes.data(), bytes.size());
  }
  EXPECT_GT(planned, 100) << "the generator makes too few valid problems to be worth running";
}

TEST(Fuzz, ACallWithoutMemoryIsRefused) {
  for (std::uint32_t seed = 0; seed < 2000 && !HasFailure(); ++seed) {
    const std::vector<std::uint8_t> bytes = random_bytes(seed);
    call_without_memory(bytes.data(), bytes.size());
  }
}

TEST(Fuzz, SmallProblemsMatchTheOracle) {
  for (std::uint32_t seed = 0; seed < 300 && !HasFailure(); ++seed) {
    SCOPED_TRACE(seed);
    const std::vector<std::uint8_t> bytes = random_bytes(seed);
    run_small(bytes.data(), bytes.size());
  }
}

}  // namespace
}  // namespace flash_attention::fuzz
