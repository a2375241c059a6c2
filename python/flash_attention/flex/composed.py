"""Operations of torch that a program has no word for, made of others. `r` is the recorder, results are symbols."""


def _float(r, x):
    return r.value(x, "float").name


def _does(r, op, *names):
    """The name of a float."""
    return r.emit("float", op, *names).name


def _chosen(r, comparison, x, bound, then, other):
    return _does(r, "where", r.emit("bool", comparison, x, bound).name, then, other)


def _of_float(make):
    """make(r, name of x, ...) -> the name of a float."""

    return lambda r, x, *more, **named: r.symbol(r.named(make(r, _float(r, x), *more, **named)))


def _number(r, x):
    return r.number(x, "float").name


def _log1p(r, x):
    """Near 0 with what 1 + x has lost of x."""
    whole = _does(r, "add", "1.0", x)
    log, lost = _does(r, "log", whole), _does(r, "sub", x, _does(r, "sub", whole, "1.0"))
    return _chosen(r, "lt", _does(r, "abs", x), "1.0", _does(r, "add", log, _does(r, "div", lost, whole)), log)


def _log_of_one_plus_exp(r, x):
    """log(1 + exp(x)) for x <= 0, so that exp does not overflow."""
    return _log1p(r, _does(r, "exp", x))


def _softplus(r, x, beta=1, threshold=20):
    bent = x if beta == 1 else _does(r, "mul", x, _number(r, beta))
    below = _log_of_one_plus_exp(r, _does(r, "neg", _does(r, "abs", bent)))
    soft = _does(r, "add", _does(r, "max", bent, "0.0"), below)
    return _chosen(r, "gt", bent, _number(r, threshold), x, soft if beta == 1 else _does(r, "div", soft, _number(r, beta)))


def _log_sigmoid(r, x):
    below = _log_of_one_plus_exp(r, _does(r, "neg", _does(r, "abs", x)))
    return _does(r, "sub", _does(r, "min", x, "0.0"), below)


def _tan(r, x):
    return _does(r, "div", _does(r, "sin", x), _does(r, "cos", x))


def _hyperbolic(op):
    def make(r, x):
        both = _does(r, op, _does(r, "exp", x), _does(r, "exp", _does(r, "neg", x)))
        return _does(r, "mul", both, "0.5")

    return make


def _leaky_relu(r, x, slope=0.01):
    return _chosen(r, "gt", x, "0.0", x, _does(r, "mul", x, _number(r, slope)))


def _reciprocal(r, x):
    return _does(r, "div", "1.0", x)


def _rsqrt(r, x):
    return _does(r, "div", "1.0", _does(r, "sqrt", x))


def _silu(r, x):
    return _does(r, "mul", x, _does(r, "sigmoid", x))


def _round(r, x, *, decimals=0):
    """Halves go to the even number."""
    if decimals != 0:
        r.refuse("a number rounded to decimals; allowed is round() to whole numbers")
    below = _does(r, "floor", x)
    rest, half = _does(r, "sub", x, below), _does(r, "mul", below, "0.5")
    is_odd = r.emit("bool", "ne", _does(r, "floor", half), half).name
    is_tie = r.emit("bool", "and", r.emit("bool", "eq", rest, "0.5").name, is_odd).name
    goes_up = r.emit("bool", "or", r.emit("bool", "gt", rest, "0.5").name, is_tie).name
    return _does(r, "where", goes_up, _does(r, "floor", _does(r, "add", below, "1.0")), below)


def _whole_is_itself(make):
    of_float = _of_float(make)
    return lambda r, x, **named: r.symbol(r.value(x)) if r.kind(x) != "float" else of_float(r, x, **named)


def _lerp(r, x, y, weight):
    x, y = _float(r, x), _float(r, y)
    return r.symbol(r.emit("float", "add", x, _does(r, "mul", _float(r, weight), _does(r, "sub", y, x))))


def _fmod(r, x, y):
    """The remainder that has the sign of x."""
    if r.kind(x) == "float" or r.kind(y) == "float":
        x, y = _float(r, x), _float(r, y)
        return r.symbol(r.emit("float", "fmod", x, y))
    x, y = r.value(x, "int").name, r.value(y, "int").name
    rest = r.emit("int", "mod", x, y).name  # has the sign of y
    differs = r.emit("bool", "xor", *(r.emit("bool", "lt", number, "0").name for number in (x, y))).name
    is_other = r.emit("bool", "and", differs, r.emit("bool", "ne", rest, "0").name).name
    return r.symbol(r.emit("int", "where", is_other, r.emit("int", "sub", rest, y).name, rest))


def _shift(op):
    """By a number that is known: a product, which goes round as a shift does, or a quotient that is rounded down."""

    def record(r, x, places):
        if not isinstance(places, int) or not 0 <= places <= 30:
            r.refuse("a shift by a value or by more than 30 places; allowed are ints from 0 to 30")
        return r.symbol(r.emit("int", op, r.value(x, "int").name, repr(2**places)))

    return record


def _is_nan(r, x):
    x = _float(r, x)
    return r.symbol(r.emit("bool", "ne", x, x))


def _is_inf(r, x):
    return r.symbol(r.emit("bool", "eq", _does(r, "abs", _float(r, x)), "inf"))


def _is_finite(r, x):
    return r.symbol(r.emit("bool", "lt", _does(r, "abs", _float(r, x)), "inf"))


def _relu(r, x):
    x = r.value(x)
    return r.symbol(r.emit(x.kind, "max", x.name, r.number(0, x.kind).name))


def _sign(r, x):
    x = r.value(x)
    zero, one, minus = (r.number(n, x.kind).name for n in (0, 1, -1))
    negative = r.emit(x.kind, "where", r.emit("bool", "lt", x.name, zero).name, minus, zero)
    return r.symbol(r.emit(x.kind, "where", r.emit("bool", "gt", x.name, zero).name, one, negative.name))


TABLE = {
    "aten::log1p": _of_float(_log1p),
    "aten::softplus": _of_float(_softplus),
    "aten::log_sigmoid_forward": lambda r, x: (_of_float(_log_sigmoid)(r, x), r.symbol(r.number(0, "float"))),
    "aten::tan": _of_float(_tan),
    "aten::sinh": _of_float(_hyperbolic("sub")),
    "aten::cosh": _of_float(_hyperbolic("add")),
    "aten::leaky_relu": _of_float(_leaky_relu),
    "aten::reciprocal": _of_float(_reciprocal),
    "aten::rsqrt": _of_float(_rsqrt),
    "aten::silu": _of_float(_silu),
    "aten::round": _whole_is_itself(_round),
    "aten::lerp": _lerp,
    "aten::fmod": _fmod,
    "aten::__lshift__": _shift("mul"),
    "aten::__rshift__": _shift("floordiv"),
    "aten::bitwise_left_shift": _shift("mul"),
    "aten::bitwise_right_shift": _shift("floordiv"),
    "aten::isnan": _is_nan,
    "aten::isinf": _is_inf,
    "aten::isfinite": _is_finite,
    "aten::relu": _relu,
    "aten::sign": _sign,
    "aten::sgn": _sign,
    "approx::tanh": lambda r, x: r.symbol(r.emit("float", "tanh", _float(r, x))),  # attention-gym's instruction
}
