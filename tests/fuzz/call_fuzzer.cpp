// libFuzzer's entry: `make fuzz`. A failed check ends the process, so that the input is kept.
#include "fuzz/small_case.h"
#include "fuzz/wild_call.h"

extern "C" int LLVMFuzzerInitialize(int*, char***) {
  ::testing::GTEST_FLAG(break_on_failure) = true;
  return 0;
}

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  if (size == 0) return 0;
  using namespace flash_attention::fuzz;
  switch (data[0] % 3) {
    case 0:
      plan_wildly(data + 1, size - 1);
      break;
    case 1:
      call_without_memory(data + 1, size - 1);
      break;
    default:
      run_small(data + 1, size - 1);
      break;
  }
  return 0;
}
