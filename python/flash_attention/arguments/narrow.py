"""Caches of one byte an element, of which 4 bits have two columns: their types, and their scales."""

import functools

import torch

from flash_attention.arguments.names import refusal

_CODES = {torch.float8_e4m3fn: "float8_e4m3", torch.float8_e5m2: "float8_e5m2", torch.int8: "int8"}
_NAMES = {
    "e4m3": "float8_e4m3",
    "fp8": "float8_e4m3",
    "fp8_e4m3": "float8_e4m3",
    "float8_e4m3fn": "float8_e4m3",
    "e5m2": "float8_e5m2",
    "fp8_e5m2": "float8_e5m2",
}


def as_bytes(k, v, cache_dtype=None):
    """(k, v, what their bytes are in C++); other tensors as they are, and ""."""
    try:
        if k.element_size() != 1:
            return k, v, ""
    except AttributeError:  # no tensor: the call says so
        return k, v, ""
    codes = _CODES.get(k.dtype) or _NAMES.get(cache_dtype, cache_dtype or "none")
    if v.dtype != k.dtype:
        raise refusal(TypeError, "v", f"got {v.dtype}; expected the dtype of {{k}}, {k.dtype}")
    return k.view(torch.uint8), v.view(torch.uint8), codes


FOUR_BITS = ("nvfp4", "mxfp4", "int4")


def columns(v, codes):
    """The columns of a row of v."""
    return v.shape[-1] * (2 if codes in FOUR_BITS else 1)


def group_bytes(scale, codes):
    """The scales of groups as they are stored: those of fp4 are bytes of any type."""
    if codes in FOUR_BITS[:2] and isinstance(scale, torch.Tensor) and scale.element_size() == 1:
        return scale.view(torch.uint8)
    return scale


def scale_tensor(scale, device):
    """A scale as a tensor: numbers are kept on their device."""
    if not isinstance(scale, (int, float)):  # torch.compile of torch 2.9 does not trace a union
        return scale
    return _full(float(scale), device) if torch.compiler.is_compiling() else _kept(float(scale), device)


def _full(value, device):
    return torch.full((1,), value, dtype=torch.float32, device=device)


_kept = functools.lru_cache(maxsize=256)(_full)
