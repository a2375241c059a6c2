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
#include "cpu/tile/amx.h"

namespace flash_attention::cpu {
const KernelTable amx_table = make_bfloat16_table<TileProducts<AmxTiles>>();
}  // namespace flash_attention::cpu
