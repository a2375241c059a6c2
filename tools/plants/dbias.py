"""Mistakes of meaning in kernels/backward/sm80_dbias*.cuh: edges of tiles, heads, what is summed, and two barriers."""

from .plant import Plant

TILES = "kernels_emulated_test */BiasGradientSm80.*"
KERNEL = "kernels/backward/sm80_dbias/kernel.cuh"
STEPS, TILE = "kernels/backward/sm80_dbias/steps.cuh", "kernels/backward/sm80_dbias/tile.cuh"

PLANTS = (
    # What is in a tile
    Plant(
        "a row past the last query is written",
        TILE,
        "if (q_begin + r >= args.seq_q) continue;",
        "if (q_begin + r > args.seq_q) continue;",
        TILES,
    ),
    Plant(
        "the last key of an odd row is not written",
        TILE,
        "if (key < seq_kv) to[0] = pair[0];",
        "if (key + 1 < seq_kv) to[0] = pair[0];",
        TILES,
    ),
    Plant(
        "pairs are written although rows are odd",
        TILE,
        "const bool by_two = args.seq_kv % 2 == 0 && ",
        "const bool by_two = ",
        TILES,
    ),
    Plant(
        "keys past the last one are loaded",
        STEPS,
        "exists && begin + first < rows.count ? 16 : 0",
        "exists && begin + first <= rows.count ? 16 : 0",
        TILES,
    ),
    Plant(
        "columns past head_dim are loaded",
        STEPS,
        "dim % panel == 0 || first_column + 8 * piece < dim;",
        "dim % panel == 0 || first_column + 8 * piece <= dim;",
        TILES,
    ),
    Plant(
        "a tile at the edge counts as all visible",
        KERNEL,
        "edge(Shape::some_hidden(score.sight, q_begin, kv_begin)) {}",
        "edge(Shape::some_hidden(score.sight, q_begin, kv_begin) && q_begin > 0) {}",
        TILES,
    ),
    # Heads and sequences
    Plant(
        "query heads take key heads in turn",
        STEPS,
        "kv_head = step.head_idx / args.group;",
        "kv_head = step.head_idx % (args.heads_q / args.group);",
        TILES,
    ),
    Plant(
        "packed: the rows of the first sequence serve all",
        STEPS,
        "      const tile::Sequence sequence = tile::make_sequence<features>(args, step.batch_idx);\n"
        "      const int q_begin = step.q_tile * block_q, kv_begin",
        "      const tile::Sequence sequence = tile::make_sequence<features>(args, features.packed ? 0 : step.batch_idx);\n"
        "      const int q_begin = step.q_tile * block_q, kv_begin",
        TILES,
    ),
    Plant(
        "dropout has the bits of the first head",
        KERNEL,
        "dropout(args, at.batch_idx, at.head_idx),",
        "dropout(args, at.batch_idx, 0),",
        TILES,
    ),
    Plant(
        "a broadcast batch is that of its first entry",
        STEPS,
        "if (all_batch() && ++step.batch_idx < args.batch) return step;",
        "",
        TILES,
    ),
    Plant(
        "a broadcast head has the key heads alone",
        STEPS,
        "if (all_heads() && ++step.head_idx < args.heads_q) return step;",
        "if (all_heads() && ++step.head_idx < args.heads_q / args.group) return step;",
        TILES,
    ),
    Plant(
        "the next head begins where the queries of the one before ended",
        STEPS,
        "    if (all_queries()) step.q_tile = 0;\n",
        "",
        TILES,
    ),
    # Sums
    Plant("a step takes the place of the one before", KERNEL, "tile_of(total[m])[i] += ", "tile_of(total[m])[i] = ", TILES),
    Plant("a tile begins with the sum of the one before", KERNEL, "    Kernel::Tile::clear(kernel.total);\n", "", TILES),
    Plant(
        "the rows of one warp are left out of a sum over queries",
        TILE,
        "for (int part = 0; part < Tile::warps_q; ++part)",
        "for (int part = 0; part + 1 < Tile::warps_q; ++part)",
        TILES,
    ),
    Plant(
        "delta is that of the next step",
        KERNEL,
        "return {ptx::shared_address(&steps.storage.statistics[step_place]), lane_row};",
        "return {ptx::shared_address(&steps.storage.statistics[Steps::after(step_place)]), lane_row};",
        TILES,
    ),
    Plant(
        "the scale of what dropout keeps is forgotten",
        KERNEL,
        "dropped[m] >> i & 1 ? 0 : incoming * steps.args.keep_scale;",
        "dropped[m] >> i & 1 ? 0 : incoming;",
        TILES,
    ),
    # Order
    Plant(
        "sums are written before the ones of the tile before are read",
        TILE,
        "  __syncthreads();  // every thread has read the sums of the tile before\n",
        "",
        TILES,
        survives="plain accesses are not watched, and the two meet only where a warp overtakes another by a tile of which "
        "nothing is seen: every step between two sums has a barrier",
    ),
    Plant(
        "sums are read before every warp has written its own",
        TILE,
        "  __syncthreads();  // the sums of every warp are written\n",
        "",
        TILES,
    ),
    Plant(
        "a step is read before it is known",
        KERNEL,
        "    __syncthreads();  // the steps are known\n",
        "",
        TILES,
    ),
    Plant(
        "a stage is filled before its panel was read",
        KERNEL,
        "      __syncthreads();  // the panel has landed;",
        "      // the panel has landed;",
        TILES,
    ),
    Plant(
        "the last panel is not waited for",
        KERNEL,
        "ptx::copy_async_wait<ahead - 1>();",
        "ptx::copy_async_wait<ahead>();",
        TILES,
    ),
)
