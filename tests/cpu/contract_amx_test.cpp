#include "cpu/contract_suite.h"

namespace flash_attention::testing {
namespace {
const bool chosen = choose_isa("amx");
}  // namespace
const CpuIsa CpuContract::isa_under_test = CpuIsa::amx;
}  // namespace flash_attention::testing
