// The kernels for AVX-512.

#include "cpu/isa/tables.h"
#include "plan/families/cpu_tiles.h"

namespace flash_attention::cpu {
namespace {
constexpr int vector_lanes = 16;
constexpr int tile_rows = 8;  // of the register tile: 8 x 3 accumulators, 3 vectors and 1 broadcast of 32 registers
constexpr int tile_vectors = 3;
constexpr int block_q = plan::cpu_block_q_avx512;
constexpr int block_kv = plan::cpu_block_kv;
constexpr int lane_multiple = vector_lanes;  // lanes of a block in use
constexpr bool only_bfloat16 = false;
}  // namespace
}  // namespace flash_attention::cpu

#include "cpu/simd/avx512.h"
//
#include "cpu/isa/table.h"

namespace flash_attention::cpu {
const KernelTable avx512_table = make_table();
}  // namespace flash_attention::cpu
