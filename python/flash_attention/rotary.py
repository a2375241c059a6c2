"""Angles of the rotary embedding for append_kv() and prepare_qk(): plain or scaled frequencies, in float64."""

import math
from collections.abc import Mapping
from typing import Any, NoReturn

import torch
from torch import Tensor

from flash_attention.arguments.keywords import refuse_keywords


def rotary_frequencies(
    rotary_dim: int,
    base: float = 10000.0,
    *,
    scaling: Mapping[str, Any] | None = None,
    max_positions: int | None = None,
    device: torch.device | str | None = None,
    **wrong: NoReturn,
) -> tuple[Tensor, float]:
    """(frequencies, magnitude): the angle of each pair at position 1, float64 [rotary_dim / 2]; a factor of cos and sin.

        frequencies, magnitude = rotary_frequencies(128, 500000.0, scaling={"rope_type": "linear", "factor": 4.0})

    Args:
        scaling: `rope_scaling` (or `rope_parameters`) of a Hugging Face configuration. "rope_type" is "default",
            "linear" (factor), "yarn" (factor, original_max_position_embeddings, beta_fast, beta_slow, attention_factor,
            mscale, mscale_all_dim, truncate) or "llama3" (factor, low_freq_factor, high_freq_factor,
            original_max_position_embeddings).
        max_positions: `max_position_embeddings` of the model, for "yarn" without an original length.
    """
    if wrong:
        refuse_keywords(rotary_frequencies, wrong)
    if rotary_dim < 2 or rotary_dim % 2:
        raise ValueError(f"rotary_dim: got {rotary_dim}; expected an even number, 2 and up")
    scaling = dict(scaling or {})
    kind = scaling.get("rope_type", scaling.get("type", "default"))
    if kind not in _KINDS:
        raise ValueError(f"scaling: got rope_type {kind!r}; allowed are {', '.join(map(repr, _KINDS))}")
    exponents = torch.arange(0, rotary_dim, 2, dtype=torch.float64, device=device) / rotary_dim
    return _KINDS[kind](float(base) ** -exponents, float(base), scaling, max_positions)


def rotary_tables(
    positions: int | Tensor,
    rotary_dim: int,
    base: float = 10000.0,
    *,
    scaling: Mapping[str, Any] | None = None,
    max_positions: int | None = None,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str | None = None,
    **wrong: NoReturn,
) -> tuple[Tensor, Tensor]:
    """(cos, sin), [positions, rotary_dim / 2], computed in float64 and rounded once.

        cos, sin = rotary_tables(4096, 64)
        q, k = prepare_qk(q, k, cos=cos, sin=sin)

    positions: their number, from 0 on, or a tensor of positions. Other arguments: see rotary_frequencies().
    """
    if wrong:
        refuse_keywords(rotary_tables, wrong)
    if isinstance(positions, Tensor):
        device = positions.device if device is None else device
        positions = positions.to(device, torch.float64)
    else:
        positions = torch.arange(positions, dtype=torch.float64, device=device)
    frequencies, magnitude = rotary_frequencies(
        rotary_dim, base, scaling=scaling, max_positions=max_positions, device=device
    )
    angles = positions[..., None] * frequencies
    return (magnitude * angles.cos()).to(dtype), (magnitude * angles.sin()).to(dtype)


def _number(scaling, name, default=None):
    value = scaling.get(name)
    if value is None:
        value = default
    if value is None:
        raise ValueError(f"scaling: {scaling.get('rope_type', scaling.get('type'))!r} needs {name!r}")
    return float(value)


def _default(frequencies, base, scaling, max_positions):
    return frequencies, 1.0


def _linear(frequencies, base, scaling, max_positions):
    return frequencies / _number(scaling, "factor"), 1.0


def _llama3(frequencies, base, scaling, max_positions):
    factor, original = _number(scaling, "factor"), _number(scaling, "original_max_position_embeddings")
    low, high = _number(scaling, "low_freq_factor"), _number(scaling, "high_freq_factor")
    turns = original * frequencies / (2 * math.pi)  # of a pair over the length that the model was trained with
    share = ((turns - low) / (high - low)).clamp(0, 1)
    return frequencies * (share + (1 - share) / factor), 1.0


def _yarn(frequencies, base, scaling, max_positions):
    original = _number(scaling, "original_max_position_embeddings", max_positions)
    factor = scaling.get("factor")
    factor = float(max_positions) / original if factor is None and max_positions else _number(scaling, "factor")
    pairs = frequencies.numel()

    def pair_of(turns):
        """The pair, as a real number, that turns this often over the original length."""
        return pairs * math.log(original / (turns * 2 * math.pi)) / math.log(base)

    first, last = pair_of(_number(scaling, "beta_fast", 32)), pair_of(_number(scaling, "beta_slow", 1))
    if scaling.get("truncate", True):
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, 2 * pairs - 1)
    last = last + 0.001 if first == last else last
    places = torch.arange(pairs, dtype=torch.float64, device=frequencies.device)
    slow = ((places - first) / (last - first)).clamp(0, 1)
    return frequencies * (1 - slow + slow / factor), _yarn_magnitude(scaling, factor)


def _yarn_magnitude(scaling, factor):
    given = scaling.get("attention_factor")
    if given is not None:
        return float(given)

    def scale(by):
        return 1.0 if factor <= 1 else 0.1 * by * math.log(factor) + 1.0

    mscale, all_dim = scaling.get("mscale"), scaling.get("mscale_all_dim")
    return scale(mscale) / scale(all_dim) if mscale and all_dim else scale(1.0)


_KINDS = {"default": _default, "linear": _linear, "yarn": _yarn, "llama3": _llama3}
