"""Mistakes of meaning in src/check: a watchdog that sleeps, or barks at what is right."""

from .plant import Plant

RIGHT = "check_test *Watchdog.LeavesRightCallsAlone/*"
RIGHT_PROGRAMS = "check_test Check.SeesWhatAProgram* WatchdogOfPrograms.*"
SEEN = "check_test Check.* WatchdogCatches.*"

PLANTS = (
    Plant(
        "NaN agrees with all",
        "src/check/check.cpp",
        "return std::fabs(got - expected) <= allowed;",
        "return !(std::fabs(got - expected) > allowed);",
        SEEN,
    ),
    Plant(
        "lse is not compared",
        "src/check/check.cpp",
        "    if (call.buffers.lse == nullptr) continue;\n",
        "    continue;\n",
        SEEN,
    ),
    Plant(
        "dv is not compared",
        "src/check/check.cpp",
        '    compare(context, "dv", place, "key", dv, wanted.dv, p.dtype);\n',
        "",
        SEEN,
    ),
    Plant(
        "the last head is never drawn",
        "src/check/sample.cpp",
        "{0, pairs - 1, draw(seed, 0, pairs)",
        "{0, 0, draw(seed, 0, pairs)",
        SEEN,
    ),
    Plant(
        "every call draws the same rows",
        "src/check/sample.cpp",
        "mix(mix(seed) + which)",
        "mix(mix(0 * seed) + which)",
        SEEN,
    ),
    Plant(
        "the allowed error is a hundred times too large",
        "src/check/derivative.h",
        "constexpr double slack = 3;",
        "constexpr double slack = 3000;",
        SEEN,
    ),
    Plant(
        "top-left is bottom-right",
        "src/check/formula.cpp",
        "p.alignment == Alignment::bottom_right ? i",
        "true ? i",
        RIGHT + "top_left*",
    ),
    Plant(
        "ALiBi follows the window's diagonal",
        "src/check/formula.cpp",
        "static_cast<double>(i + extent.len_kv - extent.len_q - j)",
        "static_cast<double>(i - j + 0 * extent.len_q)",
        RIGHT + "alibi*",
    ),
    Plant(
        "the lowest biases are as low as they are",
        "src/check/formula.cpp",
        "std::clamp(bias, -2.3e38, 2.3e38)",
        "bias",
        SEEN,
    ),
    Plant(
        "the sink is forgotten",
        "src/check/reference.cpp",
        "? call.sink(head) : -INFINITY;",
        "? -INFINITY : -INFINITY;",
        RIGHT + "*sink*",
    ),
    Plant(
        "key_lengths move the diagonal",
        "src/check/call.cpp",
        "  s.end_key = std::min(s.len_kv, length(buffers.key_lengths, b, s.len_kv));\n",
        "  s.end_key = s.len_kv = std::min(s.len_kv, length(buffers.key_lengths, b, s.len_kv));\n",
        RIGHT + "*key_lengths*",
    ),
    Plant(
        "dlse has the wrong sign",
        "src/check/derivative.cpp",
        "dot(dout, out, dim) - dlse,",
        "dot(dout, out, dim) + dlse,",
        RIGHT + "lse_gradient*",
    ),
    Plant(
        "dbias is that of the first head",
        "src/check/sums.cpp",
        "end_head = p.bias.head_stride != 0 ? place.head + 1 : p.heads_q;",
        "end_head = place.head + 1;",
        RIGHT + "*bias*",
    ),
    Plant(
        "dbias has the derivative behind the soft cap",
        "src/check/sums.cpp",
        "sum.add(d.value * first->slope,",
        "sum.add(d.value * first->derivative,",
        RIGHT + "everything*",
    ),
    Plant(
        "the derivative of a program is left out",
        "src/check/scores.cpp",
        "s.derivative *= s.slope;",
        "",
        RIGHT_PROGRAMS,
    ),
    Plant(
        "a remainder of a program has the sign of what is divided",
        "src/check/program_score.cpp",
        "(x % y + y) % y",
        "x % y",
        RIGHT_PROGRAMS,
    ),
    Plant(
        "a program's negative index is kept inside",
        "src/check/program_score.cpp",
        "along.integer < 0 ? along.integer + size : along.integer",
        "along.integer",
        RIGHT_PROGRAMS,
    ),
    Plant(
        "dsink of the first sequence alone",
        "src/check/sums.cpp",
        "for (std::int64_t b = 0; b < call.problem.batch; ++b) {\n    const std::int64_t len_q",
        "for (std::int64_t b = 0; b < 1; ++b) {\n    const std::int64_t len_q",
        RIGHT + "*sink*",
    ),
    Plant(
        "pages are read in their order",
        "src/check/call.cpp",
        "rows_from(place * strides.batch)",
        "rows_from((page + 0 * place) * strides.batch)",
        RIGHT + "paged*",
    ),
)
