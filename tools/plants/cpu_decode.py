"""Mistakes of meaning in src/cpu/decode: a few queries over many keys on a CPU."""

from .plant import Plant

DECODE = "src/cpu/decode/"
TESTS = "cpu_test *Decode*.* *Narrow*.* *Contract*.*decode* *Contract*.*one_query*"

PLANTS = (
    Plant(
        "the last group of key heads is as large as the others",
        DECODE + "decode.h",
        "num_heads = smaller(call.heads_together, call.heads_kv - first_head);",
        "num_heads = larger(1, smaller(call.heads_together, call.heads_kv - first_head - 1));",
        TESTS,
    ),
    Plant(
        "sums are rescaled where the maximum has not moved",
        DECODE + "decode.h",
        "if (rescale[row] == 1.0f) continue;",
        "if (rescale[row] != 1.0f) continue;",
        TESTS,
    ),
    Plant(
        "values that no row sees are multiplied by 0",
        DECODE + "decode.h",
        "bool safe_as_they_are = true;\n  if (!tile.weighted) {",
        "bool safe_as_they_are = true;\n  if (tile.weighted) {",
        TESTS,
    ),
    Plant(
        "the scale of values is that of keys",
        DECODE + "decode.h",
        "const float scale = scale_of_head(call, block, call.v_scale);",
        "const float scale = scale_of_head(call, block, call.k_scale);",
        TESTS,
    ),
    Plant(
        "padding rows count as queries of the next head",
        DECODE + "decode.h",
        "smaller(first + row, block.rows - 1));  // padding repeats the last",
        "smaller(first + row, block.rows - 2 < 0 ? 0 : block.rows - 2));",
        TESTS,
    ),
    Plant(
        "distances of ALiBi begin at the tile",
        DECODE + "decode_scores.h",
        "block.sequence.kv_used - block.sequence.q_used - tile.begin;\n  const Vec numbers",
        "block.sequence.kv_used - block.sequence.q_used;\n  const Vec numbers",
        TESTS,
    ),
    Plant(
        "a key at the end of a row's range is seen",
        DECODE + "decode_scores.h",
        "select((j >= block.begin[row]) & (j < block.end[row]), s, splat(-infinity));",
        "select((j >= block.begin[row]) & (j <= block.end[row]), s, splat(-infinity));",
        TESTS,
    ),
    Plant(
        "a bias of all heads is the first's",
        DECODE + "decode_scores.h",
        "block.head[row] * call.bias.head_stride + block.query[row]",
        "block.query[row]",
        TESTS,
    ),
    Plant(
        "the sum of a row is not rescaled",
        DECODE + "decode_weights.h",
        "load_some<Float32>(statistics.row_sum + row, rows) * factor + reduce_each<Sum>(sum);",
        "load_some<Float32>(statistics.row_sum + row, rows) + reduce_each<Sum>(sum);",
        TESTS,
    ),
    Plant(
        "a row that has seen nothing has a maximum of -inf to subtract",
        DECODE + "decode_weights.h",
        "const Vec origin = select(row_max == -infinity, Vec{}, row_max);",
        "const Vec origin = row_max;",
        TESTS,
    ),
    Plant(
        "the scale of a hidden key spoils its zero",
        DECODE + "decode_weights.h",
        "return select(s == 0.0f, s, s * load(factor + key));",
        "return s * load(factor + key);",
        TESTS,
    ),
    Plant(
        "the last keys of eight rows are the first",
        DECODE + "eight_rows.h",
        "const int first = larger(smaller(key, keys - quad_keys), 0);",
        "const int first = key + quad_keys > keys ? 0 : key;",
        TESTS,
    ),
)
