// The kernels for any instruction set.

#include "cpu/isa/tables.h"
#include "plan/families/cpu_tiles.h"

namespace flash_attention::cpu {
namespace {
constexpr int vector_lanes = 4;
constexpr int tile_rows = 4;  // of the register tile: 4 x 2 accumulators and the operands fit in 16 registers
constexpr int tile_vectors = 2;
constexpr int block_q = plan::cpu_block_q_generic;
constexpr int block_kv = plan::cpu_block_kv;
constexpr int lane_multiple = vector_lanes;  // lanes of a block in use
constexpr bool only_bfloat16 = false;
}  // namespace
}  // namespace flash_attention::cpu

#include "cpu/simd/generic.h"
//
#include "cpu/isa/table.h"

namespace flash_attention::cpu {
const KernelTable generic_table = make_table();
}  // namespace flash_attention::cpu
