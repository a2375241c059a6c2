#include "cpu/contract_suite.h"

namespace flash_attention::testing {
namespace {
const bool chosen = choose_isa("avx2");
}  // namespace
const CpuIsa CpuContract::isa_under_test = CpuIsa::avx2;
}  // namespace flash_attention::testing
