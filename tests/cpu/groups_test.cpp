// K and V in 4 bits on the CPU: every code and scale. The contract's cases are in contract_test.cpp.
#include <gtest/gtest.h>

#include "flash_attention/problem.h"
#include "support/append_groups.h"
#include "support/cases/group_codes.h"

namespace flash_attention::testing {
namespace {

TEST(CpuGroups, EveryCodeIsWhatItIsWorth) {
  for (const Dtype codes : {Dtype::nvfp4, Dtype::mxfp4, Dtype::int4}) {
    for (const Dtype dtype : {Dtype::float32, Dtype::float16, Dtype::bfloat16}) {
      SCOPED_TRACE(std::string(to_string(codes)) + " with " + std::string(to_string(dtype)));
      check_all_codes(codes, dtype, {});
    }
  }
}

TEST(CpuGroups, AppendQuantises) {
  for (const bool rotates : {false, true}) {
    for (const Dtype dtype : {Dtype::float32, Dtype::float16, Dtype::bfloat16}) {
      SCOPED_TRACE(std::string(to_string(dtype)) + (rotates ? ", rotated" : ""));
      check_append_groups({}, Dtype::nvfp4, dtype, 16, rotates);
      check_append_groups({}, Dtype::mxfp4, dtype, 32, rotates);
      for (const int group : {32, 64, 128}) check_append_groups({}, Dtype::int4, dtype, group, rotates);
    }
  }
}

}  // namespace
}  // namespace flash_attention::testing
