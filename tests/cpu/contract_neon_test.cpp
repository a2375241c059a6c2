#include "cpu/contract_suite.h"

namespace flash_attention::testing {
namespace {
const bool chosen = choose_isa("neon");
}  // namespace
const CpuIsa CpuContract::isa_under_test = CpuIsa::neon;
}  // namespace flash_attention::testing
