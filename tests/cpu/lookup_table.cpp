// What machines with AMX decode with (cpu/isa/amx.cpp), for CPUs that have what it uses, which is no AMX: AVX512-VBMI. As
// the objects of src/cpu/isa it includes no header with inline functions.

#include "cpu/isa/tables.h"
#include "plan/families/cpu_tiles.h"

namespace flash_attention::cpu {
namespace {
constexpr int vector_lanes = 16;
constexpr int tile_rows = 8;
constexpr int tile_vectors = 3;
constexpr int block_q = plan::cpu_amx_block_q;
constexpr int block_kv = plan::cpu_amx_block_kv;
constexpr int lane_multiple = 16;
constexpr bool only_bfloat16 = true;
}  // namespace
}  // namespace flash_attention::cpu

#include "cpu/simd/avx512_bf16.h"
//
#include "cpu/decode/lookup_dots.h"

namespace flash_attention::cpu {
namespace {
constexpr KernelTable make_table() {
  KernelTable table{};
  table.decode[0] = {decode_items, decode_by_lookup};
  table.decode[1] = {merge_items, merge};
  table.scratch_bytes = sizeof(DecodeScratch);
  table.block_q = block_q;
  return table;
}
}  // namespace

extern const KernelTable lookup_table;
const KernelTable lookup_table = make_table();
}  // namespace flash_attention::cpu
