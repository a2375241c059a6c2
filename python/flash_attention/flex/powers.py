"""x ** y. `r` is the recorder, results are symbols."""

_MOST = 64  # of an exponent that is known: by squares


def _whole(r, base, exponent):
    """base ** exponent, an int from 0."""
    result = None
    while exponent:
        if exponent & 1:
            result = base if result is None else r.emit(base.kind, "mul", result.name, base.name)
        exponent >>= 1
        base = r.emit(base.kind, "mul", base.name, base.name) if exponent else base
    return result or r.number(1, base.kind)


def _by_bits(r, base, exponent):
    """An int to the power of an int that the kernel knows: goes round as a product does."""
    result = r.number(1, "int")
    for bit in range(5):
        rest = r.emit("int", "floordiv", exponent.name, repr(2**bit))
        is_set = r.emit("bool", "eq", r.emit("int", "mod", rest.name, "2").name, "1")
        factor = r.emit("int", "where", is_set.name, base.name, "1")
        result = r.emit("int", "mul", result.name, factor.name)
        base = r.emit("int", "mul", base.name, base.name)
    return result


def _of_reals(r, x, y, exponent_is_int):
    """By the logarithm of the size of x. A negative x gives a sign where y is odd, and no number where y is not whole."""
    size = r.emit(
        "float", "exp", r.emit("float", "mul", y, r.emit("float", "log", r.emit("float", "abs", x).name).name).name
    )
    always_one = [r.emit("bool", "eq", y, "0.0"), r.emit("bool", "eq", x, "1.0")]
    is_one = r.emit("bool", "eq", r.emit("float", "abs", x).name, "1.0").name
    is_endless = r.emit("bool", "eq", r.emit("float", "abs", y).name, "inf").name
    always_one.append(r.emit("bool", "and", is_one, is_endless))
    for case in always_one:
        size = r.emit("float", "where", case.name, "1.0", size.name)
    half = r.emit("float", "mul", y, "0.5").name
    is_odd = r.emit("bool", "ne", r.emit("float", "floor", half).name, half).name
    signed = r.emit("float", "where", is_odd, r.emit("float", "neg", size.name).name, size.name)
    if not exponent_is_int:
        is_whole = r.emit("bool", "eq", r.emit("float", "floor", y).name, y).name
        is_whole = r.emit("bool", "or", is_whole, r.emit("bool", "eq", x, "-inf").name).name
        is_whole = r.emit("bool", "or", is_whole, r.emit("bool", "eq", x, "0.0").name).name  # -0
        signed = r.emit("float", "where", is_whole, signed.name, "nan")
    is_negative = r.emit("bool", "lt", x, "0.0").name
    is_negative = r.emit("bool", "or", is_negative, r.emit("bool", "lt", r.emit("float", "div", "1.0", x).name, "0.0").name)
    return r.emit("float", "where", is_negative.name, signed.name, size.name)


def _is_by_squares(y):
    return isinstance(y, int | float) and float(y).is_integer() and abs(y) <= _MOST


def is_product(r, x, y):
    """Whether x ** y is made of products alone, or has no derivative."""
    return "float" not in (r.kind(x), r.kind(y)) or (_is_by_squares(y) and y >= 0)


def power(r, x, y):
    is_known = isinstance(y, int | float)
    kind = "float" if "float" in (r.kind(x), r.kind(y)) else "int"
    if _is_by_squares(y):
        if kind == "int" and y < 0:
            r.refuse(f"an int to the power of {y}; allowed are powers from 0, or float(x)")
        result = _whole(r, r.value(x, kind), abs(int(y)))
        return r.symbol(result if y >= 0 else r.emit("float", "div", "1.0", result.name))
    if is_known and abs(y) == 0.5:
        root = r.emit("float", "sqrt", r.value(x, "float").name)
        return r.symbol(root if y > 0 else r.emit("float", "div", "1.0", root.name))
    if kind == "int":
        return r.symbol(_by_bits(r, r.value(x, "int"), r.value(y, "int")))
    base, exponent = r.value(x, "float").name, r.value(y, "float").name
    if isinstance(x, int | float) and x > 0 and x != 1:  # a number whose logarithm is known to exist
        log = r.emit("float", "log", base).name
        return r.symbol(r.emit("float", "exp", r.emit("float", "mul", exponent, log).name))
    return r.symbol(_of_reals(r, base, exponent, r.kind(y) != "float"))
