#pragma once

#include "cpu/call.h"
#include "flash_attention/plan.h"

namespace flash_attention::cpu {

/// The steps of a kernel of the planner's table, as members of an instruction set's table.
struct KernelRow {
  std::string_view kernel;
  Pass pass;
  const Step* (*steps)(const KernelTable& table);
  bool multiplies_bfloat16 = false;  // AMX and AVX512-BF16 have their own steps for bfloat16
};

/// The row of the plan's kernel. Throws Error(internal) if there is none.
const KernelRow& row_of(const Plan& plan);

}  // namespace flash_attention::cpu
