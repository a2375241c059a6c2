// The kernels in bfloat16 for AVX512-BF16.

#include "cpu/isa/tables.h"
#include "plan/cpu_tiles.h"

namespace flash_attention::cpu {
namespace {
constexpr int vector_lanes = 16;
constexpr int tile_rows = 8;
constexpr int tile_vectors = 3;
constexpr int block_q = plan::cpu_block_q_avx512;
constexpr int block_kv = plan::cpu_avx512_bf16_block_kv;
constexpr int lane_multiple = vector_lanes;
}  // namespace
}  // namespace flash_attention::cpu

#include "cpu/simd/avx512_bf16.h"
//
#include "cpu/generic/bfloat16.h"
#include "cpu/generic/dot_products.h"

namespace flash_attention::cpu {
const KernelTable avx512_bf16_table = make_bfloat16_table<DotProducts>();
}  // namespace flash_attention::cpu
