"""What each operation of torch becomes in a program. `r` is the recorder, results are symbols."""

import math

from flash_attention.flex import composed, decompositions, derivatives
from flash_attention.flex.powers import is_product, power

ALLOWED = (
    "+ - * / // % ** << >> abs neg minimum maximum clamp exp log sqrt sin cos tan tanh sigmoid erf floor round sign and "
    "their kin, torch.nn.functional's activations, isnan isinf isfinite, comparisons, & | ^ ~ and logical_*, where, "
    "masked_fill, conversions of dtype, indexing, and on few elements stack, views, sum any all amax dot isin bucketize"
)


def _common(r, *things):
    kinds = {r.kind(thing) for thing in things}
    return "float" if "float" in kinds else "int" if "int" in kinds else "bool"


def _floats(r, *things):
    return [r.value(thing, "float").name for thing in things]


def _two(op, of_bools):
    def record(r, x, y, *, alpha=1):
        kind = _common(r, x, y)
        x, y = r.value(x, kind), r.value(y, kind)
        if kind == "bool":
            if of_bools is None:
                r.refuse("bools are subtracted; ~ and ^ are allowed")
            return r.symbol(r.emit("bool", of_bools, x.name, y.name))
        if alpha != 1:
            y = r.emit(kind, "mul", y.name, r.number(alpha, kind).name)
        return r.symbol(r.emit(kind, op, x.name, y.name))

    return record


def _rsub(r, x, y, alpha=1):
    return _two("sub", None)(r, y, x, alpha=alpha)


def _truncated(r, x):
    up = r.emit("float", "neg", r.emit("float", "floor", r.emit("float", "neg", x).name).name).name
    down = r.emit("float", "floor", x).name
    return r.emit("float", "where", r.emit("bool", "lt", x, "0.0").name, up, down)


def _div(r, x, y, *, rounding_mode=None):
    if rounding_mode == "floor":
        return _floor_divide(r, x, y)
    quotient = r.emit("float", "div", *_floats(r, x, y))
    if rounding_mode is None:
        return r.symbol(quotient)
    truncated = _truncated(r, quotient.name)
    return r.symbol(truncated if _common(r, x, y) == "float" else r.emit("int", "int", truncated.name))


def _floor_divide(r, x, y):
    if _common(r, x, y) == "float":
        return r.run_ours(decompositions.floor_divide, x, y)
    return r.symbol(r.emit("int", "floordiv", r.value(x, "int").name, r.value(y, "int").name))


def _remainder(r, x, y):
    if _common(r, x, y) == "float":
        return r.run_ours(decompositions.remainder, x, y)
    return r.symbol(r.emit("int", "mod", r.value(x, "int").name, r.value(y, "int").name))


def _one(op):
    """An operation on one number, int or float; its result has the same kind."""

    def record(r, x):
        kind = "float" if r.kind(x) == "float" else "int"
        return r.symbol(r.emit(kind, op, r.value(x, kind).name))

    return record


def _real(op):
    return lambda r, x: r.symbol(r.emit("float", op, *_floats(r, x)))


def _scaled(op, before, after):
    def record(r, x):
        (x,) = _floats(r, x)
        if before != 1:
            x = r.emit("float", "mul", x, repr(before)).name
        result = r.emit("float", op, x)
        return r.symbol(result if after == 1 else r.emit("float", "mul", result.name, repr(after)))

    return record


def _rounded(how):
    def record(r, x):
        if r.kind(x) != "float":
            return r.symbol(r.value(x))
        (x,) = _floats(r, x)
        if how == "trunc":
            return r.symbol(_truncated(r, x))
        return r.symbol(r.emit("float", "neg", r.emit("float", "floor", r.emit("float", "neg", x).name).name))

    return record


def _floor(r, x):
    return r.symbol(r.emit("float", "floor", *_floats(r, x)) if r.kind(x) == "float" else r.value(x))


def _comparison(op):
    def record(r, x, y):
        kind = _common(r, x, y)
        kind = "int" if kind == "bool" else kind
        return r.symbol(r.emit("bool", op, r.value(x, kind).name, r.value(y, kind).name))

    return record


def _bitwise(op):
    def record(r, x, y):
        kind = _common(r, x, y)
        return r.symbol(r.emit(kind, op, r.value(x, kind).name, r.value(y, kind).name))

    return record


def _logical(op):
    return lambda r, *xs: r.symbol(r.emit("bool", op, *(r.value(x, "bool").name for x in xs)))


def _bitwise_not(r, x):
    x = r.value(x)
    return r.symbol(r.emit(x.kind, "not", x.name))


def _extreme(op):
    def record(r, x, y):
        kind = _common(r, x, y)
        kind = "int" if kind == "bool" else kind
        return r.symbol(r.emit(kind, op, r.value(x, kind).name, r.value(y, kind).name))

    return record


def _clamp(r, x, min=None, max=None):
    kind = _common(r, *(thing for thing in (x, min, max) if thing is not None))
    result = r.value(x, kind)
    for bound, op in ((min, "max"), (max, "min")):
        if bound is not None:
            result = r.emit(kind, op, result.name, r.value(bound, kind).name)
    return r.symbol(result)


def _where(r, condition, x, y):
    kind = _common(r, x, y)
    return r.symbol(r.emit(kind, "where", r.value(condition, "bool").name, r.value(x, kind).name, r.value(y, kind).name))


def _masked_fill(r, x, mask, value):
    result = r.value(x)
    return r.symbol(r.emit(result.kind, "where", r.value(mask, "bool").name, r.value(value, result.kind).name, result.name))


def _same(r, x, *unused, **also_unused):
    return r.symbol(r.value(x), x.dtype)


def detached(r, x):
    """Itself, without a derivative."""
    value = r.known(x)
    return x if value.kind != "float" else r.symbol(r.emit("float", "detach", value.name), x.dtype)


def _detach(r, x):
    r.value(x)
    return detached(r, x)


def _made(value_at, like=None):
    """Factories: a tensor without axes of one value."""

    def record(r, *args, dtype=None, **unused):
        from flash_attention.flex.recorder import kind_of

        shape = args[like] if like is not None and len(args) > like else ()
        value = args[value_at] if value_at >= 0 else value_at + 2  # -1: one, -2: zero
        if len(shape) != 0:
            r.refuse(f"a tensor of shape {list(shape)} is made; in a program all values are without axes")
        dtype = dtype if dtype is not None else getattr(args[0], "dtype", None)
        kind = kind_of(dtype) if dtype is not None else r.kind(value)
        return r.symbol(r.value(value, kind), dtype)

    return record


_LOG2_E, _LN_2 = math.log2(math.e), math.log(2)


def _with_slopes(record, slopes):
    return lambda r, *args, **kwargs: r.sloped(record, slopes, *args, **kwargs)


def _power(r, x, y):
    """A product has the derivatives of products."""
    return power(r, x, y) if is_product(r, x, y) else r.sloped(power, derivatives.TABLE["aten::pow"], x, y)


TABLE = (
    {
        f"aten::{name}": record
        for name, record in {
            "add": _two("add", "or"),
            "sub": _two("sub", None),
            "rsub": _rsub,
            "mul": _two("mul", "and"),
            "div": _div,
            "floor_divide": _floor_divide,
            "remainder": _remainder,
            "pow": _power,
            "neg": _one("neg"),
            "abs": _one("abs"),
            "minimum": _extreme("min"),
            "maximum": _extreme("max"),
            "exp": _real("exp"),
            "exp2": _scaled("exp", _LN_2, 1),
            "log": _real("log"),
            "log2": _scaled("log", 1, _LOG2_E),
            "tanh": _real("tanh"),
            "sigmoid": _real("sigmoid"),
            "sqrt": _real("sqrt"),
            "sin": _real("sin"),
            "cos": _real("cos"),
            "floor": _floor,
            "ceil": _rounded("ceil"),
            "trunc": _rounded("trunc"),
            "square": lambda r, x: power(r, x, 2),
            "eq": _comparison("eq"),
            "ne": _comparison("ne"),
            "lt": _comparison("lt"),
            "le": _comparison("le"),
            "gt": _comparison("gt"),
            "ge": _comparison("ge"),
            "bitwise_and": _bitwise("and"),
            "bitwise_or": _bitwise("or"),
            "bitwise_xor": _bitwise("xor"),
            "bitwise_not": _bitwise_not,
            "__and__": _bitwise("and"),
            "__or__": _bitwise("or"),
            "__xor__": _bitwise("xor"),
            "logical_and": _logical("and"),
            "logical_or": _logical("or"),
            "logical_xor": _logical("xor"),
            "logical_not": _logical("not"),
            "clamp": _clamp,
            "hardtanh": lambda r, x, least=-1, most=1: _clamp(r, x, least, most),
            "clamp_min": lambda r, x, bound: _clamp(r, x, bound),
            "clamp_max": lambda r, x, bound: _clamp(r, x, None, bound),
            "where": _where,
            "masked_fill": _masked_fill,
            "_to_copy": decompositions.to_copy,
            "clone": _same,
            "alias": _same,
            "detach": _detach,
            "lift_fresh": _same,
            "scalar_tensor": _made(0),
            "full": _made(1, 0),
            "ones": _made(-1, 0),
            "zeros": _made(-2, 0),
            "full_like": _made(1),
            "ones_like": _made(-1),
            "zeros_like": _made(-2),
            "new_ones": _made(-1, 1),
            "new_zeros": _made(-2, 1),
            "new_full": _made(2, 1),
        }.items()
    }
    | composed.TABLE
    | decompositions.TABLE
)
for _name, _slopes in derivatives.TABLE.items():
    if _name != "aten::pow":
        TABLE[_name] = _with_slopes(TABLE[_name], _slopes)


def in_place(name):
    """Records an operation in place, such as x += y, by the operation that returns a new result; None if there is no such
    operation."""
    short = name.removeprefix("aten::")
    plain = f"__{short[3:]}" if short.startswith("__i") else short.removesuffix("_")
    record = TABLE.get(f"aten::{plain}") if plain != short else None
    if record is None:
        return None

    def update(r, x, *args, **kwargs):
        value, kinds = r.known(record(r, x, *args, **kwargs)), ("bool", "int", "float")
        if kinds.index(value.kind) > kinds.index(r.kind(x)):
            r.refuse(f"a {value.kind} is assigned in place to a symbol of dtype {x.dtype}; x = x + y may change its dtype")
        r.replace(x, r.converted(value, r.kind(x)))
        return x

    return update
