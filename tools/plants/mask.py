"""Mistakes of meaning in kernels/mask, which finds out what masks show of each tile, and in writing to a cache."""

from .plant import Plant

BYTES, WORDS, MAP = "kernels/mask/bytes.cuh", "kernels/mask/words.cuh", "kernels/mask/tile_map.cuh"
ROWS, VOTES, BITS = "kernels/mask/program_rows.cuh", "kernels/mask/votes.cuh", "kernels/mask/mask_bits.cuh"
LISTED, LIST_MAP = "kernels/mask/listed_blocks.cuh", "kernels/mask/list_map.cuh"
LIST_BITS, APPEND = "kernels/tile/list_bits.cuh", "kernels/decode/append.cuh"
APPEND_ROW, APPEND_GROUPS = "kernels/decode/append_row.cuh", "kernels/decode/append_groups.cuh"
MASKS = "kernels_emulated_test */ForwardSm90Masks.* */PreparedMasks.*"
BACKWARD = "kernels_emulated_test */BackwardSm90*.*mask* */BackwardSm90*.*rows* */BackwardSm90*.*block*"
SM80 = "kernels_emulated_test */ForwardSm80*.*mask* */ForwardSm80*.*rows* */ForwardSm80*.*block*"
PROGRAMS = "kernels_emulated_test EmulatedProgramWords.*"
LISTS = "kernels_emulated_test */ListedBlocks.*"
TILED_LISTS = "kernels_emulated_test */TiledLists.*"
TILED_GRADIENTS = "kernels_emulated_test */TiledListGradients.*"
NEW_ROWS = "kernels_emulated_test */EmulatedAppend.*"
NEW_GROUPS = "kernels_emulated_test AppendGroups.*"

PLANTS = (
    Plant(
        "a tile of bytes is full if its first rows are",
        BYTES,
        "for (int i = first; i <= last && (all || !some); i += rows_at_once) {",
        "for (int i = first; i <= first && (all || !some); i += rows_at_once) {",
        SM80,
    ),
    Plant(
        "a byte is seen if it is 1",
        BYTES,
        "const bool visible = mask[r * args.mask.q_stride + j] != 0;",
        "const bool visible = mask[r * args.mask.q_stride + j] == 1;",
        SM80,
        survives="bools hold 0 and 1; other bytes are not defined",
    ),
    Plant(
        "the last tile of keys counts what is behind the keys",
        BYTES,
        "count = tile::min(mask_unit, sequence.rows_kv - begin);",
        "count = mask_unit;",
        SM80,
    ),
    Plant(
        "a tile of 64 keys in a block of 128 is the block",
        BYTES,
        "const unsigned keys = 0xffffffffu >> (32 - lanes) << unit * lanes;",
        "const unsigned keys = 0xffffffffu;",
        MASKS,
    ),
    Plant(
        "rows that other warps take hide all",
        BYTES,
        "abi::TileWords found{0, 0xffffffffu};\n  if (q_begin >= sequence.len_q) return found;",
        "abi::TileWords found{0, 0};\n  if (q_begin >= sequence.len_q) return found;",
        MASKS,
        survives="a full tile counts as one in part: slower, and the same result",
    ),
    Plant(
        "the words of odd rows are those of even ones",
        BYTES,
        "return transposed<2>(odd ? other | row1 << 4 : row0 | other << 4);",
        "return transposed<2>(odd ? other | row0 << 4 : row0 | other << 4);",
        MASKS,
    ),
    Plant(
        "the words of a second batch entry are the first's",
        WORDS,
        "map_batch = args.map_batches == 1 ? 0 : batch_idx;\n  return",
        "map_batch = 0;\n  return",
        MASKS,
    ),
    Plant(
        "the second interval of hidden rows has no end",
        WORDS,
        "if constexpr (features.hidden_bounds == 4) result |= ~before(2) & before(3);",
        "if constexpr (features.hidden_bounds == 4) result |= ~before(2);",
        MASKS,
    ),
    Plant(
        "a key is hidden from one row more",
        WORDS,
        "const int row = tile::max(bounds[which], first) - first;",
        "const int row = tile::max(bounds[which] - 1, first) - first;",
        MASKS,
    ),
    Plant(
        "columns of a block mask are those of the lane's first key",
        WORDS,
        "if constexpr (features.block_mask) result.column[k] = j / data.block_kv;",
        "if constexpr (features.block_mask) result.column[k] = tile::min(first, last) / data.block_kv;",
        MASKS,
    ),
    Plant(
        "the largest begin of a tile's keys is the least",
        MAP,
        "bounds.begin_max[which] = tile::max(bounds.begin_max[which], other(bounds.begin_max[which]));",
        "bounds.begin_max[which] = tile::min(bounds.begin_max[which], other(bounds.begin_max[which]));",
        SM80,
    ),
    Plant(
        "a block mask says of a tile what its first block does",
        MAP,
        "for (int j = unit * mask_unit / data.block_kv; j <= key_last / data.block_kv; ++j) {",
        "for (int j = unit * mask_unit / data.block_kv; j <= unit * mask_unit / data.block_kv; ++j) {",
        SM80,
    ),
    Plant(
        "a boolean mask shows what hidden rows hide",
        MAP,
        "if (bytes != TileClass::full && found != TileClass::none) found = bytes;",
        "if (bytes != TileClass::full) found = bytes;",
        "fuzz_emulated_test Kernels/CoverEmulated.*/forward_sm80 Kernels/CoverEmulated.*/forward_sm90",
    ),
    Plant(
        "a partial tile of a program is full",
        MAP,
        "return !seen.can_be_true ? TileClass::none : seen.can_be_false ? TileClass::partial : found;",
        "return !seen.can_be_true ? TileClass::none : found;",
        "kernels_emulated_test *EmulatedPrograms*.*",
    ),
    Plant(
        "the map by columns is that of its first rows",
        MAP,
        "columns[column * column_bytes + row_begin / max_map_rows] = static_cast<unsigned char>(found);",
        "columns[column * column_bytes] = static_cast<unsigned char>(found);",
        "fuzz_emulated_test Kernels/CoverEmulated.*/backward_sm90",
    ),
    Plant(
        "rows of a program that differ in the second term alone are alike",
        ROWS,
        "const bool differs = lane == 0 || !program.template alike<term>(row_at(n), row_at(tile::max(n - 1, 0)));",
        "const bool differs = lane == 0 || !program.template alike<0>(row_at(n), row_at(tile::max(n - 1, 0)));",
        PROGRAMS,
    ),
    Plant(
        "a program's last row serves the rows behind it",
        ROWS,
        "result = lane >= n ? word : result;",
        "result = lane > n ? word : result;",
        PROGRAMS,
    ),
    Plant(
        "the second half of a program's words is not made",
        ROWS,
        "task < count * keys; task += parts * num_warps",
        "task < count * keys / 2; task += parts * num_warps",
        PROGRAMS,
    ),
    Plant(
        "bytes of four queries are those of two",
        VOTES,
        "if (first_key + 15 <= last_key() && reinterpret_cast<unsigned long long>(bytes) % 16 == 0) {",
        "if (reinterpret_cast<unsigned long long>(bytes) % 16 == 0) {",
        "fuzz_emulated_test Kernels/CoverEmulated.*/backward_sm90",
    ),
    Plant(
        "tiles that are full are asked for, and others not",
        BITS,
        "left = found.seen & ~found.full; left != 0;",
        "left = found.full; left != 0;",
        "fuzz_emulated_test Kernels/CoverEmulated.*/backward_sm90",
    ),
    Plant(
        "a list of blocks serves the first of its heads",
        LISTED,
        "args.block_mask.head_stride != 0 ? args.heads_q / args.list_heads : 1;",
        "1;",
        LISTS,
    ),
    Plant(
        "blocks of the list before stay",
        LISTED,
        "for (int unit = threadIdx.x; unit < units; unit += blockDim.x) to[unit] = 0;",
        "",
        LISTS,
    ),
    Plant(
        "a row belongs to the first sequence that begins there",
        APPEND_ROW,
        "if (starts[middle] <= row) {",
        "if (starts[middle] < row) {",
        NEW_ROWS,
    ),
    Plant(
        "the angle is that of the first new row",
        APPEND_ROW,
        "(args.rotary_offsets != nullptr ? args.rotary_offsets[token.batch_idx] : length) + (same_angle ? 0 : step);",
        "(args.rotary_offsets != nullptr ? args.rotary_offsets[token.batch_idx] : length);",
        NEW_ROWS,
    ),
    Plant(
        "the scale of a row is that of its first lanes",
        APPEND_ROW,
        "for (int step = 1; step < lanes; step *= 2) most = ptx::max(most, ptx::shuffle_xor(most, step));",
        "for (int step = 1; step < lanes / 2; step *= 2) most = ptx::max(most, ptx::shuffle_xor(most, step));",
        NEW_ROWS,
    ),
    Plant(
        "values have the scale of keys",
        APPEND,
        "args.V_scale, args.V_groups, nullptr);",
        "args.K_scale, args.V_groups, nullptr);",
        NEW_ROWS,
    ),
    Plant(
        "the scale of a group is that of numbers up to 8",
        APPEND_GROUPS,
        "(bits & 0x7fffffu) > 0x400000u",
        "(bits & 0x7fffffu) > 0x7fffffu",
        NEW_GROUPS,
    ),
    Plant(
        "zeros are rounded after their scales",
        APPEND_GROUPS,
        "const float from = tile::to_float(zero);",
        "const float from = clipped(range.low);",
        NEW_GROUPS,
    ),
    Plant(
        "an entry of the first 32 counts for all",
        LIST_MAP,
        "for (int base = 0; base < list.count; base += 32) {",
        "for (int base = 0; base < tile::min(list.count, 1); base += 32) {",
        TILED_LISTS,
    ),
    Plant(
        "a list that begins in the row of tiles before is written by none",
        LIST_MAP,
        "(first + n) * args.list_block_q >= q_begin) lists",
        "(first + n) * args.list_block_q > q_begin) lists",
        TILED_LISTS,
    ),
    Plant(
        "a tile is full if one of its lists names it",
        LIST_MAP,
        "seen |= bits, full &= bits;",
        "seen |= bits, full |= bits;",
        TILED_LISTS,
    ),
    Plant(
        "odd words of the map of wide bits are those of even ones",
        LIST_MAP,
        "doubled(bits >> word % 2 * 16 & 0xffffu)",
        "doubled(bits & 0xffffu)",
        TILED_LISTS,
    ),
    Plant(
        "a row of the stack is a query",
        LIST_BITS,
        "const int query = i / rows_of_query<features>;",
        "const int query = i / (rows_of_query<features> > 1 ? 2 : 1);",
        TILED_LISTS,
    ),
    Plant(
        "a column of the map has the bits of its neighbour",
        LIST_MAP,
        "if (n == lane) own = found;",
        "if (n == (lane ^ 1)) own = found;",
        TILED_GRADIENTS,
    ),
    Plant(
        "a query that does not list a block is marked in its even place alone",
        "kernels/backward/sm90/parts/scores.cuh",
        "if (!listed || k < range.begin || k >= range.end) marks",
        "if ((!listed && e == 0) || k < range.begin || k >= range.end) marks",
        TILED_GRADIENTS,
    ),
)
