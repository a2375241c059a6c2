"""Mistakes of meaning in src/program/lower: programs that become a window or options and are none."""

from .plant import Plant

LOWER = "src/program/lower/"
WINDOW, OPTIONS = "program_test ProgramWindow.*", "program_test ProgramOptions.*"

PLANTS = (
    Plant(
        "a bound below the diagonal is a window",
        LOWER + "window.cpp",
        "positive.of_i * positive.of_j != -1 || positive.constant < 0",
        "positive.of_i * positive.of_j != -1",
        WINDOW,
    ),
    Plant(
        "a bound of a sum is one of a difference",
        LOWER + "window.cpp",
        "positive.of_i * positive.of_j != -1 || positive.constant < 0",
        "positive.constant < 0",
        WINDOW,
    ),
    Plant(
        "less is less or equal",
        LOWER + "window.cpp",
        "(node.op == Op::gt || node.op == Op::lt ? 1 : 0)",
        "(node.op == Op::gt ? 1 : 0)",
        WINDOW,
    ),
    Plant(
        "a distance bounds one side",
        LOWER + "window.cpp",
        "if (sign == 1 && !is_distance) continue;",
        "if (sign == 1) continue;",
        WINDOW,
    ),
    Plant(
        "the last of several bounds counts",
        LOWER + "window.cpp",
        "taken = taken < 0 || bound->keys < taken ? bound->keys : taken;",
        "taken = bound->keys;",
        WINDOW,
    ),
    Plant(
        "terms of a disjunction are taken",
        LOWER + "window.cpp",
        "if (node.op != Op::logical_and) {",
        "if (node.op != Op::logical_and && node.op != Op::logical_or) {",
        WINDOW,
    ),
    Plant(
        "a captured tensor of a mask is forgotten",
        LOWER + "window.cpp",
        "return captures ? std::nullopt : std::optional(window);",
        "return captures && program.score >= 0 ? std::nullopt : std::optional(window);",
        WINDOW,
    ),
    Plant(
        "constants that go round are taken",
        LOWER + "linear.cpp",
        "largest_constant = 1 << 20;",
        "largest_constant = std::int64_t{1} << 40;",
        WINDOW,
    ),
    Plant(
        "a difference is a sum",
        LOWER + "linear.cpp",
        "node.op == Op::add ? 1 : -1;",
        "node.op != Op::neg ? 1 : -1;",
        WINDOW,
    ),
    Plant(
        "an absolute distance is a signed one",
        LOWER + "options.cpp",
        "if (value.op == Op::abs) return Distance{1, true, inner->offset};",
        "if (value.op == Op::abs) return Distance{1, false, inner->offset};",
        OPTIONS,
    ),
    Plant(
        "scores that grow with the distance are ALiBi's",
        LOWER + "options.cpp",
        "if (term.slope < 0 || !term.distance || term.sign * term.distance->sign != -1) return false;",
        "if (term.slope < 0 || !term.distance) return false;",
        OPTIONS,
    ),
    Plant(
        "slopes of 16 bits are read as floats",
        LOWER + "options.cpp",
        "tensor.element != Element::float32 || tensor.rank < 1",
        "tensor.rank < 1",
        OPTIONS,
    ),
    Plant(
        "slopes by any index are slopes by sequences",
        LOWER + "options.cpp",
        "|| (tensor.rank == 2 && node(arg(slope, 0)).op != Op::b)",
        "|| (tensor.rank == 2 && node(arg(slope, 0)).op == Op::literal)",
        OPTIONS,
    ),
    Plant(
        "any part of the score is capped",
        LOWER + "options.cpp",
        "if (!is_part(node(arg(tanh, 0)), cap.real)) return false;",
        "if (is_part(node(arg(tanh, 0)), 0)) return false;",
        OPTIONS,
    ),
    Plant(
        "less the score is the score",
        LOWER + "options.cpp",
        "if (base == 1 && sum.op == Op::sub) break;",
        "if (base == 1 && sum.op == Op::mul) break;",
        OPTIONS,
    ),
    Plant(
        "a product of two distances is one",
        LOWER + "options.cpp",
        "if (term.distance) return false;",
        "if (term.distance && term.slope < 0) return false;",
        OPTIONS,
    ),
    Plant(
        "the offset of j - i has the sign of i - j",
        LOWER + "options.cpp",
        "return Distance{sign, false, sign * line->constant};",
        "return Distance{sign, false, line->constant};",
        OPTIONS,
    ),
)
