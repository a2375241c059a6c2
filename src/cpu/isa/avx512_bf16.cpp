// The kernels in bfloat16 for AVX512-BF16.

#include "cpu/isa/tables.h"
#include "plan/families/cpu_tiles.h"

namespace flash_attention::cpu {
namespace {
constexpr int vector_lanes = 16;
constexpr int tile_rows = 8;
constexpr int tile_vectors = 3;
constexpr int block_q = plan::cpu_block_q_avx512;
constexpr int block_kv = plan::cpu_avx512_bf16_block_kv;
constexpr int lane_multiple = vector_lanes;
constexpr bool only_bfloat16 = true;
}  // namespace
}  // namespace flash_attention::cpu

#include "cpu/simd/avx512_bf16.h"
//
#include "cpu/isa/bfloat16_table.h"
//
#include "cpu/decode/code_dots.h"

namespace flash_attention::cpu {
namespace {
constexpr KernelTable make_table() {
  KernelTable table = make_bfloat16_table<DotProducts>();
  table.decode[0] = {decode_items, decode_pairs};
  table.decode[1] = {merge_items, merge};
  table.scratch_bytes = larger(table.scratch_bytes, sizeof(DecodeScratch));
  return table;
}
}  // namespace

const KernelTable avx512_bf16_table = make_table();
}  // namespace flash_attention::cpu
