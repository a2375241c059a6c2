"""Functions of torch that a program has no word for, in those that it has: code of torch, recorded as the user's is."""

import math

import torch

_HALF_PI, _LN_2 = math.pi / 2, math.log(2)
_ERFC = (  # of t = 1 / (1 + |x| / 2), for the logarithm of erfc(|x|) e^(x^2) / t: within 1.2e-7
    -1.26551223, 1.00002368, 0.37409196, 0.09678418, -0.18628806, 0.27886807, -1.13520398, 1.48851587, -0.82215223,
    0.17087277,
)  # fmt: skip
_ATAN = (-0.333329491, 0.199777106, -0.138776856, 0.0805374449)  # of odd powers, up to tan(pi / 8)


def _polynomial(x, coefficients):
    total = coefficients[-1]
    for coefficient in coefficients[-2::-1]:
        total = total * x + coefficient
    return total


def _erfc(x):
    size = torch.where(x >= 0, x, -x)  # abs has no slope at 0
    t = 1 / (1 + 0.5 * size)
    tail = t * torch.exp(_polynomial(t, _ERFC) - size * size)
    return torch.where(x >= 0, tail, 2 - tail)


def _erf(x):
    return 1 - _erfc(x)


def _gelu(x, *, approximate="none"):
    if approximate == "tanh":
        return 0.5 * x * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x * x * x)))
    return 0.5 * x * _erfc(-math.sqrt(0.5) * x)


def _expm1(x):
    half = torch.tanh(0.5 * x)
    return torch.where(x.abs() < 1, 2 * half / (1 - half), torch.exp(x) - 1)


def _atan(x):
    size = torch.where(x >= 0, x, -x)
    steep, middle = size > 1 + math.sqrt(2), size > math.sqrt(2) - 1
    small = torch.where(steep, -1 / size, torch.where(middle, (size - 1) / (size + 1), size))
    square = small * small
    angle = small + small * square * _polynomial(square, _ATAN)
    angle = angle + torch.where(steep, _HALF_PI, torch.where(middle, _HALF_PI / 2, 0.0))
    return torch.where(x >= 0, angle, -angle)


def _is_negative(x):
    """-0 as well."""
    return (x < 0) | (1 / x < 0)


def _atan2(y, x):
    height, width = y.abs(), x.abs()
    least, most = torch.minimum(height, width), torch.maximum(height, width)
    part = torch.where(least == most, torch.where(most == 0, 0.0, 1.0), least / most)
    angle = _atan(part)
    angle = torch.where(height > width, _HALF_PI - angle, angle)
    angle = torch.where(_is_negative(x), math.pi - angle, angle)
    return torch.where(torch.isnan(y + x) & ~torch.isinf(y * x), math.nan, torch.where(_is_negative(y), -angle, angle))


def _asin(x):
    return _atan(x / torch.sqrt(1 - x * x))


def _asinh(x):
    size = x.abs()
    whole = torch.log1p(size + size * size / (1 + torch.sqrt(size * size + 1)))
    whole = torch.where(size > 1e9, torch.log(size) + _LN_2, whole)
    return torch.where(x < 0, -whole, whole)


def _acosh(x):
    return torch.where(x > 1e9, torch.log(x) + _LN_2, torch.log(x + torch.sqrt(x * x - 1)))


def _hypot(x, y):
    x, y = x.abs(), y.abs()
    most, part = torch.maximum(x, y), torch.minimum(x, y) / torch.maximum(x, y)
    size = torch.where(most == 0, 0.0, most * torch.sqrt(1 + part * part))
    return torch.where(torch.isinf(x) | torch.isinf(y), math.inf, size)


def _parted(x, y):
    """Floor division that is not taken in by a quotient that rounds to a whole number, as Python has it."""
    rest = torch.fmod(x, y)
    return rest, (rest != 0) & ((rest < 0) != (y < 0))


def floor_divide(x, y):
    x, y = _tensor(x), _tensor(y)
    rest, is_less = _parted(x, y)
    whole = torch.round((x - rest) / y)
    return torch.where(y == 0, x / y, torch.where(is_less, whole - 1, whole)).detach()


def remainder(x, y):
    x, y = _tensor(x), _tensor(y)
    rest, is_less = _parted(x, y)
    return torch.where(is_less, rest + y, rest)


def _logaddexp(x, y):
    both = torch.maximum(x, y) + torch.log1p(torch.exp(-(x - y).abs()))
    return torch.where((x == y) & torch.isinf(x), x, both)


def _nan_to_num(x, nan=0.0, posinf=None, neginf=None):
    most = torch.finfo(torch.float32).max
    x = torch.where(torch.isnan(x), 0.0 if nan is None else nan, x)
    x = torch.where(x == math.inf, most if posinf is None else posinf, x)
    return torch.where(x == -math.inf, -most if neginf is None else neginf, x)


def _elu(x, alpha=1, scale=1, input_scale=1):
    return torch.where(x > 0, x, (torch.exp(torch.clamp(x * input_scale, max=0.0)) - 1) * alpha) * scale


def _logit(x, eps=None):
    x = x if eps is None else torch.clamp(x, eps, 1 - eps)
    return torch.log(x / (1 - x))


def _sinc(x):
    return torch.where(x == 0, 1.0, torch.sin(math.pi * x) / (math.pi * x))


def _hardsigmoid(x):
    return torch.clamp(x + 3, 0, 6) / 6


def _narrowed(x, dtype):
    """An int as one of 8 or 16 bits has it, which goes round at its bounds."""
    bounds = torch.iinfo(dtype)
    return (x - bounds.min) % (bounds.max - bounds.min + 1) + bounds.min


def to_copy(r, x, *, dtype=None, **unused):
    """A conversion. `r` is the recorder."""
    from flash_attention.flex.recorder import kind_of

    value = r.value(x, kind_of(dtype) if dtype is not None else None)
    if dtype in (torch.int8, torch.uint8, torch.int16) and x.dtype not in (torch.bool, dtype):
        value = r.known(r.run_ours(_narrowed, r.symbol(value), dtype))
    return r.symbol(value, dtype or x.dtype)


def _tensor(x):
    return x if isinstance(x, torch.Tensor) else torch.tensor(x, device="meta")


def recorded(function):
    """As the operations of a program are: r is the recorder. Numbers in these formulas are literals."""
    return lambda r, *args, **kwargs: r.run_ours(function, *args, **kwargs)


TABLE = {
    f"aten::{name}": recorded(function)
    for name, function in {
        "erf": _erf,
        "erfc": _erfc,
        "gelu": _gelu,
        "expm1": _expm1,
        "atan": _atan,
        "atan2": _atan2,
        "asin": _asin,
        "acos": lambda x: _HALF_PI - _asin(x),
        "asinh": _asinh,
        "acosh": _acosh,
        "atanh": lambda x: 0.5 * (torch.log1p(x) - torch.log1p(-x)),
        "log10": lambda x: torch.log(x) * math.log10(math.e),
        "frac": lambda x: x - torch.trunc(x),
        "hypot": _hypot,
        "logaddexp": _logaddexp,
        "copysign": lambda x, y: torch.where(_is_negative(_tensor(y)), -x.abs(), x.abs()),
        "xlogy": lambda x, y: torch.where((_tensor(x) == 0) & ~torch.isnan(_tensor(y)), 0.0, x * torch.log(_tensor(y))),
        "nan_to_num": _nan_to_num,
        "fmax": lambda x, y: torch.where(torch.isnan(y) | (x >= y), x, y),
        "fmin": lambda x, y: torch.where(torch.isnan(y) | (x <= y), x, y),
        "heaviside": lambda x, y: torch.where(x == 0, y, torch.where(x > 0, 1.0, 0.0)),
        "logit": _logit,
        "sinc": _sinc,
        "elu": _elu,
        "celu": lambda x, alpha=1.0: _elu(x, alpha, 1, 1 / alpha),
        "mish": lambda x: x * torch.tanh(torch.nn.functional.softplus(x)),
        "hardsigmoid": _hardsigmoid,
        "hardswish": lambda x: x * _hardsigmoid(x),
        "softshrink": lambda x, bound=0.5: torch.where(x > bound, x - bound, torch.where(x < -bound, x + bound, x * 0)),
        "hardshrink": lambda x, bound=0.5: torch.where((x >= -bound) & (x <= bound), 0.0, x),
        "threshold": lambda x, bound, value: torch.where(x <= bound, value, x),
        "addcmul": lambda x, y, z, *, value=1: x + value * y * z,
        "addcdiv": lambda x, y, z, *, value=1: x + value * y / z,
    }.items()
}
