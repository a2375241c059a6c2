#include "cpu/contract_suite.h"

namespace flash_attention::testing {
namespace {
const bool chosen = choose_isa("avx512_bf16");
}  // namespace
const CpuIsa CpuContract::isa_under_test = CpuIsa::avx512_bf16;
}  // namespace flash_attention::testing
