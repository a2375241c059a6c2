// The kernels in bfloat16 for AMX.

#include "cpu/isa/tables.h"
#include "plan/families/cpu_tiles.h"

namespace flash_attention::cpu {
namespace {
constexpr int vector_lanes = 16;
constexpr int tile_rows = 8;
constexpr int tile_vectors = 3;
constexpr int block_q = plan::cpu_amx_block_q;
constexpr int block_kv = plan::cpu_amx_block_kv;
constexpr int lane_multiple = 16;  // the columns of a tile
constexpr bool only_bfloat16 = true;
}  // namespace
}  // namespace flash_attention::cpu

#include "cpu/simd/amx.h"
//
#include "cpu/isa/bfloat16_table.h"
//
#include "cpu/decode/lookup_dots.h"
#include "cpu/tile/amx.h"

namespace flash_attention::cpu {
namespace {
constexpr KernelTable make_table() {
  KernelTable table = make_bfloat16_table<TileProducts<AmxTiles>>();
  table.decode[0] = {decode_items, decode_by_lookup};
  table.decode[1] = {merge_items, merge};
  table.scratch_bytes = larger(table.scratch_bytes, sizeof(DecodeScratch));
  return table;
}
}  // namespace

const KernelTable amx_table = make_table();
}  // namespace flash_attention::cpu
