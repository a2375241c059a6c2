"""Seeds and offsets of dropout: unsigned 64-bit numbers, which torch and JAX hold as signed ones of the same bits."""

import operator

_LIMIT = 2**64


def check_seed(seed, offset):
    """(seed, offset) as ints; seed may be None."""
    return None if seed is None else _checked("seed", seed), _checked("offset", offset)


def _checked(name, value):
    if not isinstance(value, int):
        try:
            value = operator.index(value)
        except TypeError:
            raise TypeError(
                f"{name}: expected an int that is known before anything is traced, got {type(value).__name__}"
            ) from None
    if not 0 <= value < _LIMIT:
        raise ValueError(f"{name}: got {value}; allowed are 0 to 2^64 - 1")
    return value


def signed(value):
    """The int64 with the same bits."""
    return value - _LIMIT if value >= _LIMIT // 2 else value


def unsigned(value):
    """The number that signed() was given."""
    return value + _LIMIT if value < 0 else value
