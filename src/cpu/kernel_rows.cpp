#include "cpu/kernel_rows.h"

#include <algorithm>
#include <array>

#include "cpu/ladder/steps.h"
#include "flash_attention/error.h"

namespace flash_attention::cpu {
namespace {

constexpr std::array<KernelRow, 16> kernel_rows{{
    {.kernel = "cpu/prefill", .pass = Pass::forward, .steps = [](const KernelTable& table) { return table.prefill; }},
    {.kernel = "cpu/decode",
     .pass = Pass::forward,
     .steps = [](const KernelTable& table) { return table.decode; },
     .multiplies_bfloat16 = true},
    {.kernel = "cpu/bfloat16",
     .pass = Pass::forward,
     .steps = [](const KernelTable& table) { return table.prefill; },
     .multiplies_bfloat16 = true},
    {.kernel = "cpu/backward", .pass = Pass::backward, .steps = [](const KernelTable& table) { return table.backward; }},
    {.kernel = "cpu/decode",
     .pass = Pass::backward,
     .steps = [](const KernelTable& table) { return table.backward_decode; },
     .multiplies_bfloat16 = true},
    {.kernel = "cpu/bfloat16",
     .pass = Pass::backward,
     .steps = [](const KernelTable& table) { return table.backward; },
     .multiplies_bfloat16 = true},
    {.kernel = "cpu/standard",
     .pass = Pass::standard_forward,
     .steps = [](const KernelTable& table) { return table.standard_forward; }},
    {.kernel = "cpu/standard",
     .pass = Pass::standard_backward,
     .steps = [](const KernelTable& table) { return table.standard_backward; }},
    {.kernel = "cpu/tangent", .pass = Pass::tangent, .steps = [](const KernelTable& table) { return table.tangent; }},
    {.kernel = "cpu/second", .pass = Pass::second, .steps = [](const KernelTable& table) { return table.second; }},
    {.kernel = "cpu/listed", .pass = Pass::forward, .steps = [](const KernelTable& table) { return table.listed; }},
    {.kernel = "cpu/listed",
     .pass = Pass::backward,
     .steps = [](const KernelTable& table) { return table.listed_backward; }},
    {.kernel = "ladder/c0_scalar", .pass = Pass::forward, .steps = [](const KernelTable&) { return scalar_step; }},
    {.kernel = "ladder/c1_blocked", .pass = Pass::forward, .steps = [](const KernelTable&) { return blocked_step; }},
    {.kernel = "ladder/c2_simd",
     .pass = Pass::forward,
     .steps = [](const KernelTable& table) { return table.ladder_simd; }},
    {.kernel = "ladder/c3_threads",
     .pass = Pass::forward,
     .steps = [](const KernelTable& table) { return table.ladder_threads; }},
}};

}  // namespace

const KernelRow& row_of(const Plan& plan) {
  const auto found = std::ranges::find_if(
      kernel_rows, [&](const KernelRow& row) { return row.kernel == plan.kernel && row.pass == plan.pass; });
  if (found == kernel_rows.end()) throw Error(ErrorCode::internal, "the CPU has no kernel '" + plan.kernel + "'");
  return *found;
}

}  // namespace flash_attention::cpu
