#include "cpu/contract_suite.h"

namespace flash_attention::testing {
namespace {
const bool chosen = choose_isa("generic");
}  // namespace
const CpuIsa CpuContract::isa_under_test = CpuIsa::generic;
}  // namespace flash_attention::testing
