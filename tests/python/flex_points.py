"""Each operation that the recorder takes, at all points where formulas differ, and torch's values and derivatives there.

A case is a function of one or two numbers. Points of floats are zeros, ties, the bounds that a case names, infinities and
NaN.
"""

import functools
import math
from dataclasses import dataclass, field

import torch
from torch.nn import functional

inf, nan = math.inf, math.nan
FLOATS = (
    0.0,
    -0.0,
    0.25,
    -0.25,
    0.5,
    -0.5,
    1.0,
    -1.0,
    1.5,
    -1.5,
    2.5,
    -2.5,
    3.0,
    -3.0,
    7.5,
    -7.5,
    30.0,
    -30.0,
    inf,
    -inf,
    nan,
)
OF_TWO = (0.0, -0.0, 0.3, -0.3, 0.5, 1.0, -1.0, 2.0, -2.5, 3.0, -3.0, 30.0, inf, -inf, nan)
INTS = (0, 1, -1, 2, -2, 3, -3, 7, -7, 30, -30, 2**31 - 1, -(2**31))
BOOLS = (False, True)


@dataclass
class Case:
    name: str
    function: object
    points: list = field(default_factory=list)  # tuples of one or two numbers
    graded: bool = True  # whether torch has derivatives
    near: float = 3e-6  # relative; more where a logarithm is multiplied


def _one(name, function, more=(), points=FLOATS, graded=True):
    return Case(name, function, [(x,) for x in (*points, *more)], graded)


def _two(name, function, points=OF_TWO, more=(), graded=True):
    return Case(name, function, [*((x, y) for x in points for y in points), *more], graded)


def _float(f):
    return lambda *args: f(*args).float()


# By the recorder's name. An operation with several forms has several cases.
CASES = {
    "add": [
        _two("add", torch.add),
        _two("add alpha", lambda x, y: torch.add(x, y, alpha=2)),
        _two("add int", torch.add, INTS),
        _two("add bool", torch.add, BOOLS),
    ],
    "sub": [_two("sub", torch.sub), _two("sub int", torch.sub, INTS)],
    "rsub": [_two("rsub", torch.rsub), _one("rsub number", lambda x: 1 - x)],
    "mul": [_two("mul", torch.mul), _two("mul int", torch.mul, INTS), _two("mul bool", torch.mul, BOOLS)],
    "div": [
        _two("div", torch.div),
        _two("div int", torch.div, INTS),
        _one("div number", lambda x: 3 / x),
        _two("div floor", lambda x, y: torch.div(x, y, rounding_mode="floor")),
        _two("div trunc", lambda x, y: torch.div(x, y, rounding_mode="trunc")),
    ],
    "floor_divide": [
        _two(
            "floor_divide",
            torch.floor_divide,
            more=[(3.0, 0.3), (6.0, 0.3), (1.0, 0.1), (7.0, 0.7), (-3.0, 0.3), (1e4, 0.1)],
            graded=False,
        ),
        _two("floor_divide int", torch.floor_divide, [n for n in INTS if n != 0]),
    ],
    "remainder": [
        _two("remainder", torch.remainder, more=[(3.0, 0.3), (6.0, 0.3), (1.0, 0.1), (7.0, 0.7), (-3.0, 0.3), (1e4, 0.1)]),
        _one("remainder number", lambda x: x % 1.5),
        _two("remainder int", torch.remainder, [n for n in INTS if n != 0]),
    ],
    "pow": [
        _two("pow", torch.pow),
        _one("cube", lambda x: x**3),
        _one("pow 0", lambda x: x**0),
        _one("pow -1", lambda x: x**-1),
        _one("pow -2", lambda x: x**-2),
        _one("root", lambda x: x**0.5),
        _one("pow 1.5", lambda x: x**1.5),
        _one("pow -0.5", lambda x: x**-0.5),
        _one("pow 2.5 of relu", lambda x: functional.relu(x) ** 2.5),
        _one("2 pow", lambda x: 2.0**x),
        _one("1 pow", lambda x: 1.0**x),
        _one("0 pow", lambda x: torch.pow(0.0, x)),
        _one("-1 pow", lambda x: torch.pow(-1.0, x)),
        _one("pow 17", lambda x: x**17),
        _one("pow 16 int", lambda x: x**16, points=INTS),
        _two("pow int", lambda x, y: x ** (y & 31), INTS),
        Case("pow 70", lambda x: x**70, [(x,) for x in FLOATS], near=2e-5),
    ],
    "neg": [_one("neg", torch.neg), _one("neg int", torch.neg, points=INTS)],
    "abs": [_one("abs", torch.abs), _one("abs int", torch.abs, points=INTS)],
    "minimum": [_two("minimum", torch.minimum), _two("minimum int", torch.minimum, INTS)],
    "maximum": [_two("maximum", torch.maximum), _two("maximum int", torch.maximum, INTS)],
    "square": [_one("square", torch.square)],
    "clamp": [
        _one("clamp", lambda x: torch.clamp(x, -1.0, 1.5)),
        _one("clamp min > max", lambda x: torch.clamp(x, 1.5, -1.0)),
        _two("clamp of bounds", lambda x, y: torch.clamp(x, y, -y)),
        _one("clamp int", lambda x: torch.clamp(x, -2, 3), points=INTS),
        _one("clamp int by floats", lambda x: torch.clamp(x, -1.5, 2.5), points=INTS),
        _one("clamp max alone", lambda x: torch.clamp(x, max=0.5)),
    ],
    "clamp_min": [_one("clamp_min", lambda x: torch.clamp_min(x, 0.5)), _two("clamp_min of a bound", torch.clamp_min)],
    "clamp_max": [_one("clamp_max", lambda x: torch.clamp_max(x, 0.5)), _two("clamp_max of a bound", torch.clamp_max)],
    "hardtanh": [
        _one("hardtanh", functional.hardtanh),
        _one("relu6", functional.relu6, (6.0,)),
        _one("hardtanh 0, 1", lambda x: functional.hardtanh(x, 0.0, 1.0)),
    ],
    "where": [
        _two("where", lambda x, y: torch.where(x > y, x * 2, y)),
        _two("where int", lambda x, y: torch.where(x > y, x, y), INTS),
    ],
    "masked_fill": [_one("masked_fill", lambda x: x.masked_fill(x > 0.5, -1.0))],
    "leaky_relu": [_one("leaky_relu", lambda x: functional.leaky_relu(x, 0.25))],
    "softplus": [
        _one("softplus", functional.softplus, (20.0, 20.5)),
        _one("softplus 2, 5", lambda x: functional.softplus(x, 2.0, 5.0), (2.5,)),
    ],
    "round": [_one("round", torch.round, (0.49999997, -0.49999997, 8388609.0, 3.5, -3.5))],
    "lerp": [_two("lerp", lambda x, y: torch.lerp(x, y, 0.25), (0.0, 1.0, -2.5, 30.0, nan))],
    "fmod": [
        _two("fmod", torch.fmod, more=[(3.0, 0.3), (7.0, 0.7), (1e4, 0.1)]),
        _two("fmod int", torch.fmod, [n for n in INTS if n != 0]),
    ],
    "gelu": [_one("gelu", functional.gelu), _one("gelu tanh", lambda x: functional.gelu(x, approximate="tanh"))],
    "copysign": [_two("copysign", torch.copysign), _one("copysign number", lambda x: torch.copysign(x, -1.0))],
    "xlogy": [_two("xlogy", torch.special.xlogy), _one("xlogy number", lambda x: torch.special.xlogy(x, 2.0))],
    "nan_to_num": [
        _one("nan_to_num", torch.nan_to_num),
        _one("nan_to_num of given", lambda x: torch.nan_to_num(x, 1.0, 2.0, 3.0)),
    ],
    "heaviside": [_two("heaviside", torch.heaviside, graded=False)],
    "logit": [_one("logit", torch.logit), _one("logit eps", lambda x: torch.logit(x, 0.25), (0.75,))],
    "elu": [_one("elu", functional.elu), _one("selu", functional.selu), _one("elu 2", lambda x: functional.elu(x, 2.0))],
    "celu": [_one("celu", lambda x: functional.celu(x, 2.0))],
    "softshrink": [_one("softshrink", functional.softshrink)],
    "hardshrink": [_one("hardshrink", functional.hardshrink)],
    "threshold": [_one("threshold", lambda x: functional.threshold(x, 0.5, -2.0))],
    "addcmul": [_two("addcmul", lambda x, y: torch.addcmul(x, y, x, value=0.5))],
    "addcdiv": [_two("addcdiv", lambda x, y: torch.addcdiv(y, x, y, value=0.5))],
    "_to_copy": [
        _one("to float", _float(lambda x: x * 1), points=INTS),
        _one("to int", lambda x: x.int(), points=FLOATS[:-3]),
        _one("to bool", lambda x: x.bool()),
        _one("to int8", lambda x: x.to(torch.int8), points=(0, 127, 128, -128, -129, 255, 1000)),
        _one("double", lambda x: x.double().float()),
    ],
    "log_sigmoid_forward": [_one("log_sigmoid", functional.logsigmoid)],
    "acosh": [_one("acosh", torch.acosh, (1e20,))],
    "asinh": [_one("asinh", torch.asinh, (1e20, -1e20))],
    "hypot": [_two("hypot", torch.hypot, more=[(1e20, 1e20)])],
    "atan2": [_two("atan2", torch.atan2)],
    "acos": [_one("acos", torch.acos)],
    "sgn": [_one("sgn", torch.sgn), _one("sgn int", torch.sgn, points=INTS)],
    "sign": [_one("sign", torch.sign)],
    "exp": [_one("exp", torch.exp, (88.0, -80.0))],
    "exp2": [_one("exp2", torch.exp2, (100.0,))],
    "expm1": [_one("expm1", torch.expm1)],
    "frac": [_one("frac", torch.frac)],
    "isfinite": [_one("isfinite", lambda x: torch.isfinite(x))],
}
for _name in ("eq", "ne", "lt", "le", "gt", "ge"):
    _of_two = getattr(torch, _name)
    CASES[_name] = [_two(_name, _of_two), _two(f"{_name} int", _of_two, INTS), _two(f"{_name} bool", _of_two, BOOLS)]
for _name in ("bitwise_and", "bitwise_or", "bitwise_xor"):
    _of_two = getattr(torch, _name)
    CASES[_name] = [_two(f"{_name} int", _of_two, INTS), _two(f"{_name} bool", _of_two, BOOLS)]
for _name, _operator in (("__and__", "__and__"), ("__or__", "__or__"), ("__xor__", "__xor__")):
    _of_two = functools.partial(lambda operator, x, y: getattr(x, operator)(y), _operator)
    CASES[_name] = [_two(f"{_name} int", _of_two, INTS), _two(f"{_name} bool", _of_two, BOOLS)]
CASES["bitwise_not"] = [
    _one("bitwise_not int", torch.bitwise_not, points=INTS),
    _one("bitwise_not bool", torch.bitwise_not, points=BOOLS),
]
for _name in ("logical_and", "logical_or", "logical_xor"):
    CASES[_name] = [_two(_name, getattr(torch, _name))]
CASES["logical_not"] = [_one("logical_not", torch.logical_not)]
for _name in ("__lshift__", "bitwise_left_shift"):
    CASES[_name] = [_one(_name, lambda x: x << 3, points=INTS)]
for _name in ("__rshift__", "bitwise_right_shift"):
    CASES[_name] = [_one(_name, lambda x: x >> 3, points=INTS)]
for _name in (
    *(
        "log",
        "log2",
        "log10",
        "log1p",
        "tanh",
        "sigmoid",
        "sqrt",
        "rsqrt",
        "sin",
        "cos",
        "tan",
        "sinh",
        "cosh",
        "floor",
        "ceil",
        "trunc",
    ),
    *(
        "reciprocal",
        "isnan",
        "isinf",
        "erf",
        "erfc",
        "atan",
        "asin",
        "atanh",
        "sinc",
        "relu",
        "silu",
        "mish",
        "hardsigmoid",
        "hardswish",
    ),
):
    _of_one = getattr(torch, _name, None) or getattr(torch.special, _name, None) or getattr(functional, _name)
    CASES[_name] = [_one(_name, _of_one)]
for _name in ("logaddexp", "fmax", "fmin"):
    CASES[_name] = [_two(_name, getattr(torch, _name))]
# What moves or makes values, and an instruction that torch does not know.
WITHOUT_POINTS = {
    *(
        "clone",
        "alias",
        "detach",
        "lift_fresh",
        "scalar_tensor",
        "full",
        "ones",
        "zeros",
        "full_like",
        "ones_like",
        "zeros_like",
    ),
    *("new_ones", "new_zeros", "new_full", "approx::tanh"),
}
# Of arrays: torch's derivative at ties, of zeros and of what is not finite.
ARRAYS = {
    "amax": [_two("amax", lambda x, y: torch.stack([x, y, x]).amax())],
    "amin": [_two("amin", lambda x, y: torch.stack([x, y, x]).amin())],
    "max": [_two("max", lambda x, y: torch.stack([x, y, y]).max())],
    "min": [_two("min", lambda x, y: torch.stack([x, y, y]).min())],
    "sum": [
        _two("sum", lambda x, y: torch.stack([x, y, x]).sum()),
        _two("sum bool", lambda x, y: torch.stack([x, y]).sum(), BOOLS),
    ],
    "mean": [_two("mean", lambda x, y: torch.stack([x, y, x]).mean())],
    "prod": [
        _two("prod", lambda x, y: torch.stack([x, y]).prod(), (0.0, 0.5, -2.5, 30.0, nan)),
        _two("prod bool", lambda x, y: torch.stack([x, y]).prod(), BOOLS),
        _two("twice prod bool", lambda x, y: torch.stack([x, y]).prod() + torch.stack([x, y]).prod(), BOOLS),  # an int
    ],
    "any": [_two("any", lambda x, y: torch.stack([x, y]).any())],
    "all": [_two("all", lambda x, y: torch.stack([x, y]).all())],
    "linalg_vector_norm": [
        _two("norm", lambda x, y: torch.stack([x, y]).norm()),
        _two("norm 1", lambda x, y: torch.stack([x, y]).norm(1)),
    ],
}


def all_cases():
    return [case for cases in (*CASES.values(), *ARRAYS.values()) for case in cases]


def torchs(case):
    """(values, derivatives by each argument) of torch, point by point, in the type of the points."""
    values, slopes = [], []
    for point in case.points:
        args = [torch.tensor(x, dtype=_dtype(x)) for x in point]
        graded = case.graded and args[0].is_floating_point()
        args = [x.requires_grad_() for x in args] if graded else args
        # 64 bits, cut to 32: torch 2.9 ends the process if it divides the least int32 by -1.
        value = case.function(*(x.long() if x.dtype == torch.int32 else x for x in args))
        values.append(value.detach().int() if value.dtype == torch.int64 else value.detach())
        if graded and value.requires_grad:
            found = torch.autograd.grad(value, args, allow_unused=True)
            slopes.append([0.0 if slope is None else slope.item() for slope in found])
            if case.name == "atan2" and point == (0, 0) and torch.__version__ < "2.13":
                slopes[-1] = [0.0, 0.0]  # torch 2.13's; torch 2.9 has NaN
        else:
            slopes.append([0.0] * len(args) if graded else None)
    return values, slopes


def _dtype(x):
    return torch.bool if isinstance(x, bool) else torch.int32 if isinstance(x, int) else torch.float32
