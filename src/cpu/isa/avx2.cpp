// The kernels for AVX2 with FMA and F16C.

#include "cpu/isa/tables.h"
#include "cpu/simd/avx2.h"
//
#include "cpu/generic/table.h"

namespace flash_attention::cpu {

static_assert(block_q == plan::cpu_block_q_avx2);

const KernelTable avx2_table = make_table();

}  // namespace flash_attention::cpu
