// The kernels for Advanced SIMD.

#include "cpu/isa/tables.h"
#include "cpu/simd/neon.h"
//
#include "cpu/generic/table.h"

namespace flash_attention::cpu {

static_assert(block_q == plan::cpu_block_q_neon);

const KernelTable neon_table = make_table();

}  // namespace flash_attention::cpu
