"""Mistakes of meaning in kernels/decode: who takes which tiles, where parts are, their order, pages and counters."""

from .plant import Plant

COVER = "fuzz_emulated_test Kernels/CoverEmulated.*/decode_sm80"
SHAPES = "kernels_emulated_test */DecodeSm80.* DecodeSm80Workspace.*"
SCHEDULE, LOAD = "kernels/decode/schedule.cuh", "kernels/decode/sm80.cuh"
MERGE, KERNEL = "kernels/decode/merge.cuh", "kernels/decode/consumer.cuh"
GROUPS = "kernels_emulated_test */GroupedKeys.* */GroupCodes.*"
CLUSTER, SHARED = "kernels/decode/cluster_merge.cuh", "kernels_emulated_test Shared/DecodeSm90.*"

PLANTS = (
    # Schedule
    Plant(
        "the blocks with one tile more are one too few",
        SCHEDULE,
        "return block * each + tile::min(block, rest); }",
        "return block * each + tile::min(block, rest > 0 ? rest - 1 : 0); }",
        COVER,
    ),
    Plant(
        "a tile's block is looked for as if all took the same",
        SCHEDULE,
        "const int of_larger = rest * (each + 1);",
        "const int of_larger = 0 * rest * (each + 1);",
        SHAPES,
    ),
    Plant(
        "sequences without rows are not passed over",
        SCHEDULE,
        "while (item.kv_head_idx == end_head || Item<config>::row_tiles_of(sequence) == 0) {",
        "if (item.kv_head_idx == end_head) {",
        COVER,
    ),
    Plant(
        "rows without keys have no tile",
        SCHEDULE,
        "end_tile = tile::max(first_tile + 1, tile::ceil_div(seen.end, config.block_kv));",
        "end_tile = tile::max(first_tile, tile::ceil_div(seen.end, config.block_kv));",
        COVER,
    ),
    Plant(
        "the next key head has other keys",
        SCHEDULE,
        "      ++item.kv_head_idx;\n      tile = item.first_tile;\n      return;",
        "      ++item.kv_head_idx;\n      tile = 0;\n      return;",
        SHAPES,
    ),
    Plant(
        "a run begins at the beginning of its item",
        SCHEDULE,
        "found.tile = found.item.first_tile + left;",
        "found.tile = found.item.first_tile + 0 * left;",
        COVER,
    ),
    Plant(
        "a lane counts its own sequences alone",
        SCHEDULE,
        "      if (lane >= step) until += before;\n",
        "      if (lane > step) until += before;\n",
        COVER,
    ),
    Plant(
        "the last tokens of a group's tile are left out",
        SCHEDULE,
        "tile::ceil_div(end_row(row_tile, sequence.rows_q * config.group), config.group)};",
        "end_row(row_tile, sequence.rows_q * config.group) / config.group};",
        SHAPES,
    ),
    Plant(
        "both groups of warps take the same tiles",
        KERNEL,
        "tile_idx % config.key_groups == warp / layout.tile_warps;",
        "tile_idx % config.key_groups == 0;",
        "kernels_emulated_test */DecodeSm80.*long_runs* */DecodeSm90.*long_runs*",
    ),
    Plant(
        "items that are far apart are taken one after the other",
        SCHEDULE,
        "item.place(idx + static_cast<int>(gridDim.x), row_tiles, args.heads_kv);",
        "item.place(idx + 1, row_tiles, args.heads_kv);",
        "kernels_emulated_test */DecodeSm80.*whole_items* */DecodeSm90.*whole_items*",
    ),
    # Pages
    Plant("a page is that of the first sequence", LOAD, "next.item.batch_idx * args.page_table_stride +", "0 *", COVER),
    Plant(
        "the row in a page is that in the tile",
        LOAD,
        "page_row = j % args.page_size;",
        "page_row = (j % config.block_kv) % args.page_size;",
        COVER,
    ),
    Plant(
        "entries of the table are not held inside of the cache",
        LOAD,
        "page = tile::max(0, tile::min(entry, args.num_pages - 1));",
        "page = entry;",
        COVER,
        survives="the host refuses such an entry where it can see it, as it can in the emulator; on a GPU "
        "test_lengths_and_pages_out_of_range_stay_inside_the_cache finds it",
    ),
    Plant(
        "keys before a window are loaded",
        LOAD,
        "bool exists = j >= now.item.seen.begin && j < now.item.seen.end && chunk * chunk_elements < columns;",
        "bool exists = j < now.item.seen.end && chunk * chunk_elements < columns;",
        "kernels_emulated_test */DecodeSm80.*window* */DecodeSm80Contract.*window*",
        survives="their scores are hidden, and a row that 0 * NaN of their values has reached is repaired: it is slower",
    ),
    # Lists of keys
    Plant(
        "a listed key is seen wherever the window is",
        LOAD,
        "if (named < seen.begin || named >= seen.end) return;",
        "",
        "kernels_emulated_test */DecodeListCases.*window* */DecodeListCases.*causal*",
    ),
    Plant(
        "all key heads have the first one's list",
        LOAD,
        "args.list_heads > 1 ? next.item.kv_head_idx : 0",
        "0",
        "kernels_emulated_test */DecodeListCases.*list_pages* */DecodeListCases.*group*",
    ),
    Plant(
        "entries that are no key have a score",
        KERNEL,
        "bits >> e % 2 & 1 ? score.in_units(S[0][n][e], 0, 0) : -tile::infinity",
        "score.in_units(S[0][n][e], 0, 0)",
        "kernels_emulated_test */DecodeListCases.*list_bfloat16",
    ),
    Plant(
        "columns past head_dim are loaded",
        LOAD,
        "j < now.item.seen.end && chunk * chunk_elements < columns;",
        "j < now.item.seen.end;",
        "kernels_emulated_test */DecodeSm80.*two_long_runs* */DecodeSm80.*head_dim*",
    ),
    # Parts
    Plant(
        "the first part is where the next block's is",
        MERGE,
        "return 2 * (first + x) + (x == 0 ? 1 : 0); }",
        "return 2 * (first + x); }",
        COVER,
        survives="two items meet there only where a block overtakes the one before it, and the emulator keeps their order",
    ),
    Plant("the last to arrive is one too early", MERGE, "& 0xffff) + own < count)", "& 0xffff) + own + 1 < count)", COVER),
    Plant(
        "the counter does not go back to 0",
        MERGE,
        "    ptx::store_global(words + block, tag_of(block));\n    return true;",
        "    return true;",
        "kernels_emulated_test DecodeSm80Workspace.*",
    ),
    Plant(
        "what the workspace held counts",
        MERGE,
        "if ((found & ~Word{0xffff}) != tag_of(block))",
        "if (false && (found & ~Word{0xffff}) != tag_of(block))",
        COVER,
    ),
    Plant(
        "a counter of the item before is not prepared",
        KERNEL,
        "        parts.prepare(run.first_block());\n",
        "",
        COVER,
        survives="the block that begins the item prepares the same word before it can be the first to arrive; only a "
        "block that arrives before the first one has started needs it, and the emulator starts blocks in order",
    ),
    Plant(
        "parts are merged by their sums alone",
        MERGE,
        "for (int x = own; x < end; x += 32) factors[x - begin] = ptx::exp2(factors[x - begin] - reference);",
        "for (int x = own; x < end; x += 32) factors[x - begin] = 1;",
        COVER,
    ),
    Plant(
        "a lane's parts past the first are not rescaled",
        MERGE,
        "sum = sum * ptx::exp2(max - larger) + statistics[1] * ptx::exp2(statistics[0] - larger);",
        "sum = sum + statistics[1] * ptx::exp2(statistics[0] - larger);",
        SHAPES,
    ),
    Plant("a part without a number is passed over", MERGE, "        sum += statistics[1];", "        sum += 0;", SHAPES),
    Plant(
        "parts behind the first few are forgotten",
        MERGE,
        "for (int x = begin; x < end; x += together) {",
        "for (int x = begin; x < tile::min(end, begin + together); x += together) {",
        COVER,
    ),
    Plant(
        "the sink is that of the key head",
        MERGE,
        "if constexpr (features.sink) sink = args.sink[row.head_idx];",
        "if constexpr (features.sink) sink = args.sink[item.kv_head_idx];",
        COVER,
    ),
    # Rows
    Plant(
        "rows of a group are those of the next head",
        MERGE,
        "return {packed / config.group, item.kv_head_idx * config.group + packed % config.group};",
        "return {packed % (num_rows() / config.group + 1), item.kv_head_idx * config.group + packed % config.group};",
        COVER,
    ),
    Plant(
        "rows past seqused_q are attended",
        MERGE,
        "    if (row.query >= sequence.len_q) {\n      lse = -tile::infinity;\n      return 0;\n    }\n",
        "",
        SHAPES,
    ),
    Plant(
        "the same rows are kept for another sequence",
        KERNEL,
        "same_rows = cursor.item.batch_idx == batch_idx && cursor.item.row_tile == row_tile;",
        "same_rows = cursor.item.row_tile == row_tile;",
        COVER,
    ),
    Plant(
        "a tile with a hidden key at its beginning counts as all visible",
        KERNEL,
        'if (kv_begin < full.begin || kv_begin + warp_keys > full.end) {\n      ptx::path<"decode/sm80 edge tile">();',
        'if (kv_begin + warp_keys > full.end) {\n      ptx::path<"decode/sm80 edge tile">();',
        COVER,
    ),
    Plant(
        "a warp of keys that end inside of it is left out",
        KERNEL,
        "if (!own || kv_begin >= seen.end || kv_begin + warp_keys <= seen.begin) {",
        "if (kv_begin + warp_keys > seen.end || kv_begin + warp_keys <= seen.begin) {",
        COVER,
    ),
    # 4 bits
    Plant(
        "columns of values have the scale of the first group of 32",
        "kernels/decode/turned.cuh",
        "if (features.kv_group == 16 && lane >= 16) halves",
        "if (features.kv_group == 16 && lane >= 32) halves",
        GROUPS,
    ),
    Plant(
        "the columns of the last 64 are taken for 32 of each lane",
        "kernels/decode/turned.cuh",
        "(unit + 128 <= dim ? 32 : 16) * t",
        "32 * t",
        GROUPS,
    ),
    Plant(
        "probabilities are not multiplied by what values of nvfp4 lack",
        KERNEL,
        "rows.template update<factor == 1 ? 0 : 8>",
        "rows.template update<0>",
        GROUPS,
    ),
    Plant(
        "the second 32 keys have the scales of the first",
        KERNEL,
        "K_groups += keys * Turned::groups.key_bytes, V_groups",
        "K_groups += 0, V_groups",
        GROUPS,
    ),
    Plant(
        "the first values of a tile are not waited for",
        "kernels/decode/code_loader.cuh",
        "ptx::copy_async_wait<keys || own_rows <= 32 ? 1 : 0>();",
        "ptx::copy_async_wait<keys || own_rows <= 32 ? 1 : 2>();",
        GROUPS,
    ),
    Plant(
        "keys that no query sees are read",
        "kernels/decode/code_loader.cuh",
        "rows[r].load(view, offset, row < own_rows && exists(row));",
        "rows[r].load(view, offset, row < own_rows);",
        GROUPS,
    ),
    Plant(
        "rows of the next tile begin a row early",
        "kernels/decode/code_loader.cuh",
        "places.V += near(config.block_kv, args.V.seq_stride)",
        "places.V += near(config.block_kv - 1, args.V.seq_stride)",
        GROUPS,
    ),
    # Clusters
    Plant(
        "a block sends while another still reads its tiles",
        CLUSTER,
        "    ptx::cluster_mbarrier_wait(mailbox.tiles_read, 0);\n",
        "",
        SHARED,
    ),
    Plant(
        "pieces are shared out as if the parts were a power of two",
        CLUSTER,
        "return (piece >> shift) * parts + part; }",
        "return ((piece >> shift) << shift) + part; }",
        SHARED,
    ),
    Plant(
        "pieces are merged before all of them are there",
        CLUSTER,
        "    ptx::cluster_mbarrier_wait(out.storage.mailbox.received, 0);\n",
        "",
        SHARED,
    ),
)
