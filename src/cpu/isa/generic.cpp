// The kernels for any instruction set.

#include "cpu/isa/tables.h"
#include "cpu/simd/generic.h"
//
#include "cpu/generic/table.h"

namespace flash_attention::cpu {

static_assert(block_q == plan::cpu_block_q_generic);

const KernelTable generic_table = make_table();

}  // namespace flash_attention::cpu
