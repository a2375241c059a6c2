// The kernels for AVX-512.

#include "cpu/isa/tables.h"
#include "cpu/simd/avx512.h"
//
#include "cpu/generic/table.h"

namespace flash_attention::cpu {

static_assert(block_q == plan::cpu_block_q_avx512);

const KernelTable avx512_table = make_table();

}  // namespace flash_attention::cpu
