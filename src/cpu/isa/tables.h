#pragma once

#include "cpu/call.h"

namespace flash_attention::cpu {

// The exports of each object of this folder, which has no others (tests/cpu/symbols_test.cpp).
extern const KernelTable generic_table;
extern const KernelTable neon_table;
extern const KernelTable avx2_table;
extern const KernelTable avx512_table;

// These have some of the kernels. All other kernels run on AVX-512.
extern const KernelTable avx512_bf16_table;
extern const KernelTable amx_table;

}  // namespace flash_attention::cpu
