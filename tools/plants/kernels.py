"""Mistakes of meaning in kernels: an option that forgets another, an edge off by one, a wrong head, parity or counter.

The part of the covering arrays (tests/fuzz) that `make test` takes finds nearly all of them.
"""

from .plant import Plant


def cover(*kernels: str) -> str:
    return "fuzz_emulated_test " + " ".join(f"Kernels/CoverEmulated.*/{kernel}" for kernel in kernels)


SCORE, VISIBILITY = "kernels/tile/score.cuh", "kernels/tile/visibility.cuh"
SEQUENCE, DROPOUT = "kernels/tile/sequence.cuh", "kernels/tile/dropout.cuh"
ANY, BACKWARD = cover("*"), cover("backward_*")

PLANTS = (
    # Packed sequences and what counts by batch entry
    Plant(
        "packed: the bias of the first sequence serves all",
        SCORE,
        "args.bias.data) + sequence.batch_idx * args.bias.batch_stride +",
        "args.bias.data) + (features.packed ? 0 : sequence.batch_idx) * args.bias.batch_stride +",
        ANY,
    ),
    Plant(
        "packed: the mask of the first sequence serves all",
        VISIBILITY,
        "args.mask.data) + sequence.batch_idx * args.mask.batch_stride +",
        "args.mask.data) + (features.packed ? 0 : sequence.batch_idx) * args.mask.batch_stride +",
        ANY,
    ),
    Plant(
        "packed: the slopes of the first sequence serve all",
        SCORE,
        "args.alibi_slopes[sequence.batch_idx * args.alibi_batch_stride + head_idx];",
        "args.alibi_slopes[(features.packed ? 0 : sequence.batch_idx) * args.alibi_batch_stride + head_idx];",
        ANY,
    ),
    Plant(
        "packed: ALiBi measures by the longest sequence",
        SCORE,
        "const int distance = i + sight.len_kv - sight.len_q - j;",
        "const int distance = i + (features.packed ? 0 : sight.len_kv - sight.len_q) - j;",
        ANY,
    ),
    Plant(
        "packed: dbias of all sequences goes to the first",
        "kernels/backward/dbias.cuh",
        "static_cast<typename Gradient::Bias*>(args.dbias) + batch_idx * args.dbias_batch_stride +",
        "static_cast<typename Gradient::Bias*>(args.dbias) + "
        "(config.features.packed ? 0 : batch_idx) * args.dbias_batch_stride +",
        BACKWARD,
    ),
    Plant(
        "packed: dlse lies as if it were not packed",
        "kernels/backward/delta.cuh",
        "delta[i] = sum - (args.dlse != nullptr ? args.dlse[statistics + i] : 0);",
        "delta[i] = sum - (args.dlse != nullptr ? args.dlse[config.features.packed ? i : statistics + i] : 0);",
        BACKWARD,
    ),
    Plant(
        "packed: dsink is that of the last sequence",
        "kernels/backward/delta.cuh",
        "  for (int batch_idx = 0; batch_idx < args.batch; ++batch_idx) {\n"
        "    const tile::Sequence sequence = tile::make_sequence<features>(args, batch_idx);\n"
        "    const long long statistics = tile::statistics_offset<features>(args, sequence, head_idx);\n"
        "    for (int i = thread;",
        "  for (int batch_idx = features.packed ? args.batch - 1 : 0; batch_idx < args.batch; ++batch_idx) {\n"
        "    const tile::Sequence sequence = tile::make_sequence<features>(args, batch_idx);\n"
        "    const long long statistics = tile::statistics_offset<features>(args, sequence, head_idx);\n"
        "    for (int i = thread;",
        BACKWARD,
    ),
    Plant(
        "packed: the sink is not in lse",
        "kernels/forward/sm90/epilogue.cuh",
        "if constexpr (!features.sink) return lse;",
        "if constexpr (!features.sink || features.packed) return lse;",
        cover("forward_sm90"),
    ),
    Plant(
        "packed: rows begin at 16-bit offsets",
        SEQUENCE,
        "sequence.start_kv = args.cu_seqlens_kv[batch_idx];",
        "sequence.start_kv = static_cast<short>(args.cu_seqlens_kv[batch_idx]);",
        "kernels_emulated_test *FarSequence*",
    ),
    # Lengths
    Plant(
        "seqused: the diagonal lies where the tensors end",
        VISIBILITY,
        "diagonal(features.top_left ? 0 : sequence.len_kv - sequence.len_q / rows_of_query<features>),",
        "diagonal(features.top_left ? 0 : sequence.rows_kv - sequence.rows_q / rows_of_query<features>),",
        "kernels_emulated_test */ForwardPortable.*/seqused_*",
    ),
    Plant(
        "key_lengths move the diagonal",
        VISIBILITY,
        "diagonal(features.top_left ? 0 : sequence.len_kv - sequence.len_q / rows_of_query<features>),",
        "diagonal(features.top_left ? 0 : sequence.visible_kv - sequence.len_q / rows_of_query<features>),",
        "kernels_emulated_test */StandardForward.*/key_lengths_causal_*",
    ),
    Plant(
        "key_lengths let keys past seqused_kv be seen",
        SEQUENCE,
        "sequence.visible_kv = max(0, min(sequence.len_kv, args.key_lengths[batch_idx]));",
        "sequence.visible_kv = max(0, min(sequence.rows_kv, args.key_lengths[batch_idx]));",
        ANY,
    ),
    Plant(
        "rows past seqused_q see keys",
        VISIBILITY,
        "KeyRange range{0, i < len_q ? visible_kv : 0};",
        "KeyRange range{0, visible_kv};",
        ANY,
    ),
    # Masks
    Plant(
        "ALiBi follows the diagonal of the top-left corner",
        SCORE,
        "const int distance = i + sight.len_kv - sight.len_q - j;",
        "const int distance = i + sight.diagonal - j;",
        "kernels_emulated_test */ForwardPortable.*/alibi_top_left_*",
    ),
    Plant(
        "forward/sm90: ALiBi follows the diagonal of the top-left corner",
        "kernels/forward/sm90/softmax.cuh",
        "static_cast<float>(q + score.sight.len_kv - score.sight.len_q - first_key);",
        "static_cast<float>(q + score.sight.diagonal - first_key);",
        "kernels_emulated_test */ForwardSm90Loops.*/slopes_top_left_*",
    ),
    Plant(
        "mask bytes other than 1 hide",
        VISIBILITY,
        "mask[i * mask_stride + j] != 0;",
        "mask[i * mask_stride + j] == 1;",
        ANY,
    ),
    Plant(
        "forward/sm90: mask bytes other than 1 hide",
        "kernels/forward/sm90/softmax.cuh",
        "kv_begin + column + key_of(i)] != 0;",
        "kv_begin + column + key_of(i)] == 1;",
        cover("forward_sm90"),
    ),
    Plant(
        "a window begins one key late",
        VISIBILITY,
        "range.begin = max(range.begin, window_begin(i));",
        "range.begin = max(range.begin, window_begin(i) + 1);",
        ANY,
    ),
    Plant(
        "a window ends one key early",
        VISIBILITY,
        "range.end = min(range.end, window_end(i));",
        "range.end = min(range.end, window_end(i) - 1);",
        ANY,
    ),
    Plant(
        "the last tile of a window is not visited",
        VISIBILITY,
        "end = min(end, window_end(q_last));\n    if (begin >= end) return {0, 0};\n    return {begin / block_kv,",
        "end = min(end, window_end(q_last) - 1);\n    if (begin >= end) return {0, 0};\n    return {begin / block_kv,",
        ANY,
    ),
    Plant(
        "a tile with one hidden key counts as all visible",
        VISIBILITY,
        "result = result && kv_begin + block_kv - 1 <= window_end(q_begin) - 1;",
        "result = result && kv_begin + block_kv - 2 <= window_end(q_begin) - 1;",
        "kernels_emulated_test */ForwardSm80.*/causal_edge*",
    ),
    Plant(
        "forward/sm90: the right edge of a window is one key short",
        "kernels/forward/sm90/softmax.cuh",
        "last = tile::min(last, score.sight.window_end(q));",
        "last = tile::min(last, score.sight.window_end(q) - 1);",
        cover("forward_sm90"),
    ),
    Plant(
        "forward/sm90: the left edge of a window is one key late",
        "kernels/forward/sm90/softmax.cuh",
        "first = score.sight.window_begin(q);",
        "first = score.sight.window_begin(q) + 1;",
        cover("forward_sm90"),
    ),
    Plant(
        "a chunk begins one position early",
        "kernels/abi/key_bounds.h",
        "first + (position - first) / chunk * chunk;",
        "first + (position - first + 1) / chunk * chunk;",
        "kernels_emulated_test */ForwardPortable.*/chunk*",
    ),
    Plant(
        "backward does not look for the queries of a chunk",
        VISIBILITY,
        "end = min(end, chunk_begin(kv_last) + chunk - diagonal);",
        "end = min(end, chunk_begin(kv_begin) + chunk - diagonal);",
        "kernels_emulated_test */BackwardPortable.*/chunk*",
    ),
    # Heads
    Plant(
        "dbias of a broadcast head sums the key heads alone",
        "kernels/backward/dbias.cuh",
        "Gradient::along(all_heads, head_idx, args.heads_q);",
        "Gradient::along(all_heads, head_idx, args.heads_q / args.group);",
        BACKWARD,
    ),
    Plant(
        "a repaired key has the first query head of its group alone",
        "kernels/backward/repair.cuh",
        "head_idx < (kv_head_idx + 1) * args.group && !done;",
        "head_idx < kv_head_idx * args.group + 1 && !done;",
        cover("backward_sm80", "backward_sm90"),
    ),
    Plant(
        "forward/sm80: query heads take key heads in turn",
        "kernels/forward/sm80/kernel.cuh",
        "auto result = tile::key_rows<const Key, features>(view, sequence, head_idx / args.group);",
        "auto result = tile::key_rows<const Key, features>(view, sequence, head_idx % (args.heads_q / args.group));",
        cover("forward_sm80"),
    ),
    # Floats in two parts
    Plant(
        "tf32: the lower parts of B do not count",
        "kernels/tile/split.cuh",
        "B[s].low);",
        "B[s].high);",
        "kernels_emulated_test Draws/ForwardTf32Accuracy.*",
    ),
    Plant(
        "tf32: the higher part is cut off",
        "kernels/tile/split.cuh",
        "+ 0x1000u) & 0xffffe000u;",
        ") & 0xfffe0000u;",
        "kernels_emulated_test Draws/ForwardTf32Accuracy.*",
    ),
    Plant(
        "forward/tf32: an lse that is NaN is left",
        "kernels/forward/repair.cuh",
        "if (lse == lse || i >= sequence.len_q) return lse;",
        "return lse;",
        "kernels_emulated_test ForwardTf32Numbers.*",
    ),
    # Rows that see nothing, and rows that are done again
    Plant(
        "forward/sm90: lse of an empty row is 0",
        "kernels/forward/sm90/epilogue.cuh",
        "const float lse = empty ? -tile::infinity :",
        "const float lse = empty ? 0.0f :",
        cover("forward_sm90"),
    ),
    Plant(
        "dsink of rows that see nothing is not 0",
        "kernels/backward/delta.cuh",
        "if (lse != -tile::infinity) sum -=",
        "sum -=",
        BACKWARD,
    ),
    Plant(
        "forward/sm90: rows that overflow are not done again",
        "kernels/forward/sm90/epilogue.cuh",
        "(sum[r] >= 0.5f && sum[r] < highest_sum &&",
        "(sum[r] >= 0.5f && sum[r] < tile::infinity &&",
        cover("forward_sm90"),
        survives="probabilities that a type cannot hold are Inf in the output, and such a row is done again for that",
    ),
    Plant(
        "forward/sm90: rows with a huge reference are not done again",
        "kernels/forward/sm90/epilogue.cuh",
        "sum[r] < highest_sum && !math.is_large(maximum[r]));",
        "sum[r] < highest_sum);",
        "kernels_emulated_test */ForwardScores.*",
    ),
    Plant(
        "forward/sm90: splits of keys weigh the same whatever their references are",
        "kernels/forward/sm90/merge.cuh",
        "statistics[1] * ptx::exp2((statistics[0] - reference) * exponent_scale);",
        "statistics[1];",
        "kernels_emulated_test */ForwardSm90Splits.*",
    ),
    Plant(
        "forward/sm90_fp8: a huge reference is not noticed",
        "kernels/forward/sm90_fp8/kv_loop.cuh",
        "const bool large = ptx::any(Rows::is_large(math, rows));",
        "const bool large = false;",
        "kernels_emulated_test */ForwardScores.*",
    ),
    Plant(
        "forward/sm89_fp8: V's even and odd columns are exchanged",
        "kernels/forward/sm89_fp8.cuh",
        "ptx::permute_bytes(V[2 * i], V[2 * i + 1], 0x6420u)",
        "ptx::permute_bytes(V[2 * i], V[2 * i + 1], 0x7531u)",
        "kernels_emulated_test Cases/ForwardSm89Fp8.*:ForwardSm89Fp8Accuracy.*",
    ),
    Plant(
        "forward/sm89_fp8: P's keys are in the order of its registers, not in that of V",
        "kernels/forward/sm89_fp8.cuh",
        "const float* odd = P[4 * step + i / 2 * 2 + 1]",
        "const float* odd = P[4 * step + i / 2 * 2]",
        "kernels_emulated_test Cases/ForwardSm89Fp8.*:ForwardSm89Fp8Accuracy.*",
    ),
    Plant(
        "forward/sm89_fp8: P has its exponents of bfloat16",
        "kernels/forward/sm80/kernel.cuh",
        "log2_P_scale = codes ? 8 :",
        "log2_P_scale = codes ? 0 :",
        "kernels_emulated_test Cases/ForwardSm89Fp8.*:ForwardSm89Fp8Accuracy.*",
    ),
    Plant(
        "forward/sm89_fp8: O is written over K and V that other warps still read",
        "kernels/forward/sm80/kernel.cuh",
        "if constexpr (column_warps > 1 || codes) __syncthreads();",
        "if constexpr (column_warps > 1) __syncthreads();",
        "kernels_emulated_test Cases/ForwardSm89Fp8.*:ForwardSm89Fp8Accuracy.*",
    ),
    Plant(
        "forward/sm89_fp8: the scale of V is left out",
        "kernels/forward/sm80/kernel.cuh",
        "if constexpr (codes) factor *= v_scale;",
        "",
        "kernels_emulated_test Cases/ForwardSm89Fp8.*:ForwardSm89Fp8Accuracy.*",
    ),
    Plant(
        "forward/sm80: the product of a huge maximum and the scale is rounded",
        "kernels/tile/softmax.cuh",
        "if (exact || ptx::any(",
        "if (exact || false && ptx::any(",
        "kernels_emulated_test */ForwardScores.*",
    ),
    Plant(
        "forward/sm90: a soft cap near 0 by exponentials",
        "kernels/tile/fixed_order.cuh",
        "if (!interior && square < 0.01f)",
        "if (!interior && square < 0)",
        "kernels_emulated_test */ForwardScores.*",
    ),
    Plant(
        "the fixed order: decoding keeps a reference whose sum is too large",
        "kernels/decode/ordered.cuh",
        "suspect = suspect || tile::may_exceed<type>(largest, sum[half]);",
        "suspect = suspect || largest < 0;",
        "kernels_emulated_test Invariant.EmulatedLargeScores",
    ),
    Plant(
        "the fixed order: a prefill tile with a reference that was too low is not repeated",
        "kernels/forward/sm90/ordered_loop.cuh",
        "rows.sum[r] = kept && !sound ? tile::infinity : sum;",
        "rows.sum[r] = kept && !sound && sum < 0 ? tile::infinity : sum;",
        "kernels_emulated_test Invariant.EmulatedLargeScores",
    ),
    Plant(
        "the slope of a soft cap from its rounded value",
        "kernels/tile/math.cuh",
        "  slope = exponential * shortfall * shortfall;",
        "  slope = 1.0f - (1.0f - shortfall) * (1.0f - shortfall);",
        "kernels_emulated_test Slopes/*",
    ),
    Plant(
        "forward/sm90: a repeated tile begins in the other phase",
        "kernels/forward/sm90/kernel.cuh",
        "      if (ptx::shuffle(shared.last_attempt, 0) <= attempt) break;\n",
        "      if (ptx::shuffle(shared.last_attempt, 0) <= attempt) break;\n      wg.num_blocks += S::stages;\n",
        cover("forward_sm90"),
    ),
    # Dropout
    Plant(
        "dropout: the counter of rows runs on past bit 3",
        DROPOUT,
        "return static_cast<unsigned>(i) / 16 * 8 + static_cast<unsigned>(i) % 8;",
        "return static_cast<unsigned>(i) / 8 * 8 + static_cast<unsigned>(i) % 8;",
        ANY,
    ),
    Plant(
        "dropout: batch entries share their bits",
        DROPOUT,
        "plane(static_cast<unsigned>(batch_idx * args.heads_q + head_idx)),",
        "plane(static_cast<unsigned>(head_idx)),",
        ANY,
    ),
    Plant(
        "forward/sm90: dropout counts the columns of a block from the wrong one on",
        "kernels/forward/sm90/softmax.cuh",
        "draw.dropout.words(draw.rows, draw.columns + i / 2, random);",
        "draw.dropout.words(draw.rows, draw.columns + i / 4, random);",
        cover("forward_sm90"),
    ),
    # Strides
    Plant(
        "dbias with a gap behind the bias's rows",
        "kernels/backward/dbias.cuh",
        "q_tile_idx * block_rows * args.dbias_q_stride + kv_begin;",
        "q_tile_idx * block_rows * args.bias.q_stride + kv_begin;",
        BACKWARD,
    ),
    # Forward mode and second derivatives
    Plant(
        "forward mode: the slope of the soft cap is left out",
        "kernels/tile/tangents.cuh",
        "result.tangent = result.of_cap * result.raw;",
        "result.tangent = result.raw;",
        "kernels_emulated_test AllAtOnce/TangentPortable.*",
    ),
    Plant(
        "second derivatives: the curvature of the soft cap is left out",
        "kernels/tile/tangents.cuh",
        "result.curvature = -2 * capped",
        "result.curvature = 0 * capped",
        "kernels_emulated_test AllAtOnce/SecondPortable.*",
    ),
    Plant(
        "second derivatives: dsink without the sink's tangent",
        "kernels/second/portable.cuh",
        "return tangent * delta[row] + rest[row];",
        "return rest[row];",
        "kernels_emulated_test AllAtOnce/SecondPortable.*",
    ),
    Plant(
        "tangent/sm80: sums stay where the center was",
        "kernels/tangent/sm80/kernel.cuh",
        "A[0][n][e] = ptx::fma(A[0][n][e], rescale[e / 2], -step[e / 2] * O[0][n][e]);",
        "A[0][n][e] = A[0][n][e] * rescale[e / 2];",
        "kernels_emulated_test AllAtOnce/TangentSm80.* AllAtOnce/TangentSm90.*",
    ),
    Plant(
        "tangent/sm90: the second warpgroup multiplies the first one's queries",
        "kernels/tangent/sm90/kernel.cuh",
        "const int own_rows = warpgroup * 64 * 128;",
        "const int own_rows = 0;",
        "kernels_emulated_test AllAtOnce/TangentSm90.*",
    ),
    Plant(
        "tangent/sm90: the late products of values read the stage of the next tile",
        "kernels/tangent/sm90/kernel.cuh",
        "issue_values<true>(P, W, shared.tiles.stages[last.stage]);\n      pingpong_signal();",
        "issue_values<true>(P, W, shared.tiles.stages[place.stage]);\n      pingpong_signal();",
        "kernels_emulated_test Bfloat16/TangentSm90.*plain* AllAtOnce/TangentSm90.*128*",
    ),
    Plant(
        "second/sm90: the second warpgroup multiplies the first one's rows",
        "kernels/second/sm90/kernel.cuh",
        "of_rows.bytes + warpgroup * 64 * 128",
        "of_rows.bytes",
        "kernels_emulated_test AllAtOnce/SecondSm90.*",
    ),
    Plant(
        "second/sm90: a stage is not waited for",
        "kernels/second/sm90/kernel.cuh",
        "      ptx::mbarrier_wait(shared.full[place.stage], place.phase);\n",
        "",
        "kernels_emulated_test AllAtOnce/SecondSm90.*",
    ),
    Plant(
        "forward/key_mass_sm90: the second tile of a warpgroup has the keys of the first one",
        "kernels/forward/key_mass_sm90.cuh",
        "keys.at((warpgroup_row + 64 * m) * 128",
        "keys.at(warpgroup_row * 128",
        "kernels_emulated_test TilesOfKeyMass/*",
    ),
    Plant(
        "second/sm80: NaN behind a mask reaches the sums",
        "kernels/second/sm80/kernel.cuh",
        "        clear_nonfinite(column);\n",
        "",
        "kernels_emulated_test Bfloat16/SecondSm80.*nan*",
    ),
    # Programs and 8-bit keys
    Plant(
        "a program's slope is left out",
        "kernels/backward/portable.cuh",
        "if constexpr (features.score_program && at != At::program) dS[r][c + e] *= slope;",
        "if constexpr (false) dS[r][c + e] *= slope;",
        cover("backward_portable"),
    ),
    Plant(
        "a score that a program makes -inf is not hidden",
        "kernels/forward/portable.cuh",
        "if (features.score_program && S[r][c] == -tile::infinity) S[r][c] = tile::hidden();",
        "if (features.score_program && S[r][c] == -tile::infinity) S[r][c] = -1e4f;",
        "kernels_emulated_test */EmulatedPrograms.NanBehindAProgramIsHarmless/0",
    ),
    Plant(
        "the scales of key rows are left out",
        "kernels/forward/portable.cuh",
        "return dot * tile::token_scale<config.features>(args, args.K_scale, sequence, kv_head_idx, j);",
        "return dot;",
        "kernels_emulated_test */NarrowKeysPortable.*",
    ),
    Plant(
        "backward/sm90, wide: a program's slope does not reach dK",
        "kernels/backward/sm90/wide/kernel.cuh",
        "constexpr bool has_slope = config.features.softcap || config.features.score_program;",
        "constexpr bool has_slope = config.features.softcap;",
        "kernels_emulated_test EmulatedSm90Programs.SlopesOfWideHeads",
    ),
)
