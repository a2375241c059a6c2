"""Derivatives of operations that are made of others, if the parts would give other values: at zeros, bounds and ties, and
for infinities and NaN.

Each has the values of torch's derivative. It is torch code and is recorded as the user's code is: (result, *arguments) ->
the derivative by each argument, or None if it has none.
"""

import functools
import math
import operator

import torch

__all__ = ["FOLDS", "TABLE"]

_LN_10, _TWO_OVER_ROOT_PI = math.log(10), 2 / math.sqrt(math.pi)
_BETA, _KAPPA = math.sqrt(2 / math.pi), 0.044715


def _is_number(x):
    return isinstance(x, bool | int | float)


def _if(condition):
    """1 where it holds, else 0."""
    return torch.where(condition, 1.0, 0.0)


def _clamp(result, x, low=None, high=None):
    """An x at a bound shares the derivative with it if the bound is a tensor; beside a number x gets 0."""
    if low is not None and high is not None and not (_is_number(low) or _is_number(high)):
        is_crossed, is_below, is_above = low > high, x < low, x > high
        is_low, is_high = (x == low) & (low < high), (x == high) & (low < high)
        by_x = torch.where(is_below | is_above | (is_crossed & (x == x)), 0.0, torch.where(is_low | is_high, 0.5, 1.0))
        by_low = torch.where(is_below & (low <= high), 1.0, torch.where(is_low, 0.5, 0.0))
        return by_x, by_low, torch.where(is_above | is_crossed, 1.0, torch.where(is_high, 0.5, 0.0))
    if low is not None and not _is_number(low):
        return *_of_larger(x, low), None
    if high is not None and not _is_number(high):
        by_x, by_high = _of_larger(high, x)  # the smaller has it
        return by_x, None, by_high
    inside = [] if low is None else [x > low]
    inside += [] if high is None else [x < high]
    return _if(functools.reduce(operator.and_, inside)), None, None


def _of_larger(x, y):
    """The derivatives of maximum(x, y): equal arguments share it; if one is NaN, both get all of it."""
    is_same = x == y
    return tuple(torch.where(loses, 0.0, torch.where(is_same, 0.5, 1.0)) for loses in (x < y, y < x))


def _clamp_before_2_15(result, x, low=None, high=None):
    """x counts at a bound, too."""
    is_low, is_high = None if low is None else x < low, None if high is None else x > high
    inside = [] if low is None else [x >= low]
    inside += [] if high is None else [x <= high]
    by_x = _if(functools.reduce(operator.and_, inside))
    if low is None or high is None or _is_number(low) or _is_number(high):
        return by_x, *(None if outside is None else _if(outside) for outside in (is_low, is_high))
    return by_x, _if(is_low & (low < high)), _if(is_high | (high < low))


def _hardtanh(result, x, low=-1, high=1):
    return (torch.where((x <= low) | (x >= high), 0.0, 1.0),)


def _power(result, x, exponent):
    if _is_number(exponent):
        return (exponent * x ** (exponent - 1),)
    if _is_number(x):
        log = math.log(x) if x > 0 else -math.inf if x == 0 else math.nan
        return None, torch.where((exponent >= 0) & (x == 0), 0.0, result * log)
    by_x = torch.where(exponent == 0, 0.0, exponent * x ** (exponent - 1))
    return by_x, torch.where((x == 0) & (exponent >= 0), 0.0, result * torch.log(x))


def _gelu(result, x, *, approximate="none"):
    if approximate == "tanh":
        bent = torch.tanh(_BETA * (x + _KAPPA * x * x * x))
        return (0.5 * (1 + bent) + 0.5 * x * (1 - bent * bent) * _BETA * (1 + 3 * _KAPPA * x * x),)
    density = torch.exp(-0.5 * x * x) / math.sqrt(2 * math.pi)
    return (0.5 * torch.erfc(-math.sqrt(0.5) * x) + x * density,)


def _softplus(result, x, beta=1, threshold=20):
    bent = torch.exp(x * beta)
    return (torch.where(x * beta > threshold, 1.0, bent / (bent + 1)),)


def _log_sigmoid(result, x):
    bent = torch.exp(-torch.abs(x))
    part = bent / (1 + bent)
    return (torch.where(x < 0, 1 - part, part),)


def _elu(result, x, alpha=1, scale=1, input_scale=1):
    return (torch.where(x <= 0, input_scale * alpha * scale * torch.exp(x * input_scale), scale),)


def _mish(result, x):
    bent = torch.tanh(torch.log1p(torch.exp(x)))
    return (bent + x * torch.sigmoid(x) * (1 - bent * bent),)


def _hardswish(result, x):
    return (torch.where(x <= -3, 0.0, torch.where(x < 3, x / 3 + 0.5, 1.0)),)


def _logit(result, x, eps=None):
    slope = 1 / (x * (1 - x))
    if eps is None:
        return (torch.where((x < 0) | (x > 1), math.nan, slope),)
    return (torch.where((x < eps) | (x > 1 - eps), 0.0, slope),)


def _sinc(result, x):
    angle = math.pi * x
    return (torch.where(x == 0, 0.0, (angle * torch.cos(angle) - torch.sin(angle)) / (angle * x)),)


def _atan2(result, y, x):
    square = y * y + x * x
    part = torch.where(square == 0, 0.0, 1 / square)
    return x * part, -y * part


def _logaddexp(result, x, y):
    return 1 / (1 + torch.exp(y - x)), 1 / (1 + torch.exp(x - y))


def _xlogy(result, x, y):
    if _is_number(y):
        return torch.where((x == 0) & (y <= 0), 0.0, math.log(y) if y > 0 else -math.inf if y == 0 else math.nan), None
    return torch.where((x == 0) & (y <= 0) if not _is_number(x) else (y <= 0) & (x == 0), 0.0, torch.log(y)), x / y


def _taken(wins):
    """The derivatives of fmax and fmin: the argument that is taken gets all. Equal ones share; before torch 2.15 the first
    got all."""

    def slopes(result, x, y):
        by_x = torch.where(wins(x, y) | torch.isnan(y), 1.0, torch.where(x == y, _SHARE, 0.0))
        return by_x, 1 - by_x

    return slopes


def _remainder(rounding_mode):
    def slopes(result, x, y):
        return 1.0, None if _is_number(y) else -torch.div(x, y, rounding_mode=rounding_mode)

    return slopes


def _shrunk(result, x, bound=0.5):
    return (torch.where((x >= -bound) & (x <= bound), 0.0, 1.0),)


_clamps, _SHARE = (_clamp_before_2_15, 1.0) if torch.__version__ < (2, 15) else (_clamp, 0.5)


def _of_ties(result, *elements):
    """The derivatives of amax and amin: all elements that are equal share."""
    shares = [_if(x == result) for x in elements]
    return [share / sum(shares) for share in shares]


def _of_ties_or_nan(result, *elements):
    """The same of max and min, for which NaN is equal to NaN."""
    shares = [_if((x == result) | (torch.isnan(x) & torch.isnan(result))) for x in elements]
    return [share / sum(shares) for share in shares]


def _of_product(result, *elements):
    before, after = [1.0], [1.0]
    for x, y in zip(elements[:-1], elements[:0:-1], strict=True):
        before.append(before[-1] * x)
        after.append(after[-1] * y)
    has_zero = functools.reduce(operator.or_, (x == 0 for x in elements))
    others = (x * y for x, y in zip(before, reversed(after), strict=True))
    return [torch.where(has_zero, other, result / x) for x, other in zip(elements, others, strict=True)]


def _of_norm(result, *elements):
    return [torch.where(result == 0, 0.0, x / result) for x in elements]


FOLDS = {
    "amax": _of_ties,
    "amin": _of_ties,
    "max": _of_ties_or_nan,
    "min": _of_ties_or_nan,
    "prod": _of_product,
    "norm": _of_norm,
}
TABLE = {
    f"aten::{name}": slopes
    for name, slopes in {
        "clamp": _clamps,
        "clamp_min": lambda result, x, low: _clamps(result, x, low)[:2],
        "clamp_max": lambda result, x, high: _clamps(result, x, None, high)[::2],
        "hardtanh": _hardtanh,
        "relu": lambda result, x: (torch.where(result <= 0, 0.0, 1.0),),
        "pow": _power,
        "remainder": _remainder("floor"),
        "fmod": _remainder("trunc"),
        "tan": lambda result, x: (1 + result * result,),
        "erf": lambda result, x: (_TWO_OVER_ROOT_PI * torch.exp(-x * x),),
        "erfc": lambda result, x: (-_TWO_OVER_ROOT_PI * torch.exp(-x * x),),
        "gelu": _gelu,
        "expm1": lambda result, x: (result + 1,),
        "log1p": lambda result, x: (1 / (x + 1),),
        "log10": lambda result, x: (1 / (x * _LN_10),),
        "atan": lambda result, x: (1 / (x * x + 1),),
        "atan2": _atan2,
        "asin": lambda result, x: (torch.rsqrt(1 - x * x),),
        "acos": lambda result, x: (-torch.rsqrt(1 - x * x),),
        "asinh": lambda result, x: (torch.rsqrt(x * x + 1),),
        "acosh": lambda result, x: (torch.rsqrt(x * x - 1),),
        "atanh": lambda result, x: (1 / (1 - x * x),),
        "hypot": lambda result, x, y: (x / result, y / result),
        "logaddexp": _logaddexp,
        "copysign": lambda result, x, y: (torch.where(x == 0, 0.0, result / x), None),
        "xlogy": _xlogy,
        "nan_to_num": lambda result, x, *unused, **also_unused: (_if(torch.isfinite(x)),),
        "fmax": _taken(lambda x, y: x > y),
        "fmin": _taken(lambda x, y: x < y),
        "softplus": _softplus,
        "log_sigmoid_forward": _log_sigmoid,
        "elu": _elu,
        "celu": lambda result, x, alpha=1.0: _elu(result, x, alpha, 1, 1 / alpha),
        "mish": _mish,
        "hardsigmoid": lambda result, x: (torch.where((x > -3) & (x < 3), 1 / 6, 0.0),),
        "hardswish": _hardswish,
        "softshrink": _shrunk,
        "hardshrink": _shrunk,
        "threshold": lambda result, x, bound, value: (torch.where(x <= bound, 0.0, 1.0),),
        "logit": _logit,
        "sinc": _sinc,
        "silu": lambda result, x: (torch.sigmoid(x) * (1 + x * (1 - torch.sigmoid(x))),),
        "frac": lambda result, x: (1.0,),
        "addcdiv": lambda result, x, y, z, *, value=1: (1.0, value / z, -value * y / (z * z)),
    }.items()
}
