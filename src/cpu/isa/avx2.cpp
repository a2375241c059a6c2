// The kernels for AVX2 with FMA and F16C.

#include "cpu/isa/tables.h"
#include "plan/families/cpu_tiles.h"

namespace flash_attention::cpu {
namespace {
constexpr int vector_lanes = 8;
constexpr int tile_rows = 4;  // of the register tile: 4 x 3 accumulators, 3 vectors and 1 broadcast are 16 registers
constexpr int tile_vectors = 3;
constexpr int block_q = plan::cpu_block_q_avx2;
constexpr int block_kv = plan::cpu_block_kv;
constexpr int lane_multiple = vector_lanes;  // lanes of a block in use
constexpr bool only_bfloat16 = false;
}  // namespace
}  // namespace flash_attention::cpu

#include "cpu/simd/avx2.h"
//
#include "cpu/isa/table.h"

namespace flash_attention::cpu {
const KernelTable avx2_table = make_table();
}  // namespace flash_attention::cpu
