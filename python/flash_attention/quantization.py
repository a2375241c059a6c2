"""Converts tensors of 16 or 32 bits to 8 bits: codes and their descales, and a rotation against outliers."""

import math
from typing import Literal, NamedTuple, NoReturn

import torch
from torch import Tensor

from flash_attention.arguments.keywords import refuse_keywords

_LARGEST = {torch.float8_e4m3fn: 448.0, torch.float8_e5m2: 57344.0}
_NAMES = {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}


@torch.no_grad()
def quantize(
    x: Tensor,
    dtype: torch.dtype | str = torch.float8_e4m3fn,
    scales: Literal["head", "tensor"] = "head",
    *,
    heads_kv: int | None = None,
    cu_seqlens: Tensor | None = None,
    layout: Literal["bshd", "bhsd"] = "bshd",
    hadamard: bool = False,
    seed: int = 0,
    **wrong: NoReturn,
) -> tuple[Tensor, Tensor]:
    """(codes, descale): x is about codes * descale; its largest element gets the largest code of the type.

        (q8, q_scale), (k8, k_scale), (v8, v_scale) = (quantize(x) for x in (q, k, v))
        out = attention(q8, k8, v8, q_descale=q_scale, k_descale=k_scale, v_descale=v_scale)

    Args:
        x: q, k or v, [batch, seq, heads, head_dim] (or as layout says), or with cu_seqlens [total, heads, head_dim].
        dtype: torch.float8_e4m3fn or torch.float8_e5m2, or "e4m3", "e5m2".
        scales: "head" gives a descale for each sequence and key head, float32 [batch, heads_kv], in the form of attention()
            and FlashAttention-3; "tensor" gives one, float32 [1].
        heads_kv: for q, whose heads share a descale in groups; None = the heads of x.
        cu_seqlens: int32 [batch + 1], the beginnings of packed sequences.
        hadamard: rotate() the rows first. Use it for both q and k, whose products then do not change; not for v.
        seed: of the rotation; the same for q and k.

    Nothing waits for a GPU. A tensor of zeros has descales of 1; a NaN makes its descale NaN.
    """
    if wrong:
        refuse_keywords(quantize, wrong)
    dtype = _NAMES.get(dtype, dtype)
    if dtype not in _LARGEST:
        raise ValueError(f"dtype: got {dtype}; allowed are torch.float8_e4m3fn and torch.float8_e5m2")
    if scales not in ("head", "tensor"):
        raise ValueError(f"scales: got {scales!r}; allowed are 'head' and 'tensor'")
    if not isinstance(x, Tensor) or not x.is_floating_point() or x.dim() != (4 if cu_seqlens is None else 3):
        got = f"{x.dtype} {list(x.shape)}" if isinstance(x, Tensor) else type(x).__name__
        raise ValueError(
            f"x: got {got}; expected [batch, seq, heads, head_dim], or [total, heads, head_dim] with cu_seqlens"
        )
    x = rotate(x, seed) if hadamard else x.float()
    largest = _LARGEST[dtype]
    if scales == "tensor":
        descale = _descale_of(x.abs().amax().reshape(1) if x.numel() else x.new_zeros(1), largest)
        return _codes(x, descale, largest, dtype), descale
    axis = 1 if layout == "bhsd" and cu_seqlens is None else x.dim() - 2
    heads = x.shape[axis]
    heads_kv = heads if heads_kv is None else heads_kv
    if heads_kv < 1 or heads % heads_kv:
        raise ValueError(f"heads_kv: got {heads_kv}; expected a divisor of {heads}, the heads of x")
    if cu_seqlens is None:
        by_head = x.abs().amax((3 - axis, 3)) if x.shape[3 - axis] else x.new_zeros(x.shape[0], heads)
    else:
        by_head, of_row = _packed_maxima(x, cu_seqlens)
    descale = _descale_of(by_head.unflatten(1, (heads_kv, heads // heads_kv)).amax(2), largest)
    factor = descale.repeat_interleave(heads // heads_kv, 1)
    if cu_seqlens is not None:
        factor = factor[of_row][..., None]
    else:
        factor = factor[:, :, None, None] if axis == 1 else factor[:, None, :, None]
    return _codes(x, factor, largest, dtype), descale


@torch.no_grad()
def rotate(x: Tensor, seed: int = 0, **wrong: NoReturn) -> Tensor:
    """x in float32 with its rows multiplied by an orthogonal matrix: random signs, then a Hadamard matrix.

        scores = rotate(q) @ rotate(k).mT  # those of q and k

    It spreads outliers of a few columns over all columns. If both q and k are rotated, q . k does not change. A head_dim
    that is no power of two is rotated in blocks of the largest power of two that divides it.
    """
    if wrong:
        refuse_keywords(rotate, wrong)
    dim = x.shape[-1]
    size = dim & -dim
    generator = torch.Generator("cpu").manual_seed(seed)
    signs = (torch.randint(0, 2, (dim,), generator=generator, device="cpu") * 2 - 1).to(x.device, torch.float32)
    rows = (x.float() * signs).reshape(*x.shape[:-1], dim // size, size)
    width = 1
    while width < size:
        pairs = rows.reshape(*rows.shape[:-1], size // (2 * width), 2, width)
        rows = torch.stack((pairs[..., 0, :] + pairs[..., 1, :], pairs[..., 0, :] - pairs[..., 1, :]), -2)
        rows = rows.reshape(*x.shape[:-1], dim // size, size)
        width *= 2
    return rows.reshape(x.shape) / math.sqrt(size)


def _packed_maxima(x, cu_seqlens):
    """[batch, heads], and the sequence of each row; rows of no sequence count to the last one."""
    batch = cu_seqlens.shape[0] - 1
    rows = torch.arange(x.shape[0], device=x.device)
    of_row = (torch.searchsorted(cu_seqlens.to(torch.int64), rows, right=True) - 1).clamp(0, max(batch - 1, 0))
    maxima = x.new_zeros(batch, x.shape[1])
    return maxima.scatter_reduce_(0, of_row[:, None].expand(-1, x.shape[1]), x.abs().amax(2), "amax"), of_row


def _descale_of(largest_of, largest):
    descale = largest_of / largest
    return torch.where(descale == 0, torch.ones_like(descale), descale.clamp(min=2.0**-100))


def _codes(x, descale, largest, dtype):
    return (x / descale).clamp(-largest, largest).to(dtype)


class CacheCodes(NamedTuple):
    """K or V in 4 bits, as append_kv() writes and attention_over_cache() reads them."""

    codes: Tensor  # uint8 [..., head_dim / 2]
    scale: Tensor  # of groups: uint8 [..., head_dim / group], or the type of x (int4)
    zero: Tensor | None  # int4: as scale
    global_scale: Tensor | None  # nvfp4: float32 [1], as it was given


@torch.no_grad()
def quantize_cache(
    x: Tensor, cache_dtype: str, *, group: int | None = None, global_scale: Tensor | float | None = None, **wrong: NoReturn
) -> CacheCodes:
    """Keys or values as codes of 4 bits, two in a byte, with a scale for each group of columns.

        k4, k_scale, _, _ = quantize_cache(k, "nvfp4")
        v4, v_scale, _, _ = quantize_cache(v, "nvfp4")
        out = attention_over_cache(q, k4, v4, k_scale=k_scale, v_scale=v_scale, cache_dtype="nvfp4")

    Args:
        x: [..., head_dim] of float32, float16 or bfloat16; groups fill its rows.
        cache_dtype: "nvfp4" (e2m1 with scales in e4m3), "mxfp4" (e2m1 with powers of two, e8m0) or "int4" (0 to 15 with a
            scale and a zero in the type of x).
        group: columns that share a scale: 16 of nvfp4, 32 of mxfp4, 32, 64 or 128 of int4; None = the least.
        global_scale: nvfp4: one number, by which all scales are multiplied; x.abs().max() / (6 * 448) uses all of e4m3.

    The codes are those that append_kv() writes: docs/numerics.md, "4-bit caches". Nothing waits for a GPU.
    """
    if wrong:
        refuse_keywords(quantize_cache, wrong)
    if not isinstance(x, Tensor) or x.dtype not in (torch.float32, torch.float16, torch.bfloat16) or x.dim() == 0:
        got = f"{x.dtype} {list(x.shape)}" if isinstance(x, Tensor) else type(x).__name__
        raise ValueError(f"x: got {got}; expected [..., head_dim] of float32, float16 or bfloat16")
    group = _group_of(cache_dtype, group, x.shape[-1])
    if global_scale is not None and cache_dtype != "nvfp4":
        raise ValueError("global_scale: it belongs to nvfp4")
    grouped = x.float().unflatten(-1, (-1, group))
    hurt = grouped.isnan().any(-1)
    values = grouped.nan_to_num(0.0, math.inf, -math.inf)
    if cache_dtype == "int4":
        finite = torch.finfo(x.dtype).max
        values = values.clamp(-finite, finite)
        zero = values.amin(-1).to(x.dtype)
        scale = (values.amax(-1) / 15 - zero.float() / 15).to(x.dtype)
        step = scale.float()
        factor = torch.where(step > 0, 1 / step, 0)
        codes = ((values - zero.float()[..., None]) * factor[..., None]).clamp(0, 15).round().to(torch.uint8)
        return CacheCodes(_packed(codes, hurt), scale, zero.masked_fill(hurt, math.nan), None)
    largest, tensor_scale = values.abs().amax(-1), None
    if cache_dtype == "nvfp4":
        if global_scale is not None:
            tensor_scale = torch.as_tensor(global_scale, dtype=torch.float32, device=x.device).reshape(1)
        times = 1 if tensor_scale is None else tensor_scale
        stored = (largest / (6 * times)).clamp(2.0**-9, 448.0).to(torch.float8_e4m3fn)
        factor, scale = 1 / (stored.float() * times), stored.view(torch.uint8).masked_fill(hurt, 0x7F)
    else:
        half = x.dtype == torch.float16
        fraction, exponent = torch.frexp(largest)  # 6 * 2^e is 0.75 * 2^(e + 3)
        wanted = torch.where(largest.isinf(), 126, exponent - 3 + (fraction > 0.75))
        wanted = torch.where(largest == 0, -127, wanted).clamp(-24 if half else -100, 15 if half else 127)
        factor, scale = torch.exp2(-wanted.float()), (wanted + 127).to(torch.uint8).masked_fill(hurt, 255)
    return CacheCodes(_packed(_e2m1(values * factor[..., None]), hurt), scale, None, tensor_scale)


@torch.no_grad()
def dequantize_cache(
    codes: Tensor,
    cache_dtype: str,
    scale: Tensor,
    zero: Tensor | None = None,
    global_scale: Tensor | float | None = None,
    *,
    dtype: torch.dtype = torch.float32,
    **wrong: NoReturn,
) -> Tensor:
    """The values of codes of 4 bits, [..., head_dim]: what quantisation has left of `x` of quantize_cache().

        k4, scale, zero, _ = quantize_cache(k, "int4")
        k_again = dequantize_cache(k4, "int4", scale, zero)

    dtype: of the result. int4 rounds each value once to the type of its zeros, as kernels do.
    """
    if wrong:
        refuse_keywords(dequantize_cache, wrong)
    head_dim = 2 * codes.shape[-1]
    group = _group_of(cache_dtype, head_dim // max(scale.shape[-1], 1), head_dim)
    both = codes.view(torch.uint8)
    numbers = torch.stack((both & 15, both >> 4), -1).flatten(-2).unflatten(-1, (-1, group))
    if cache_dtype == "int4":
        if zero is None:
            raise ValueError("zero: int4 has a zero for each group")
        exact = numbers.double() * scale[..., None].double() + zero[..., None].double()
        return exact.to(zero.dtype).flatten(-2).to(dtype)
    magnitude = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6], device=codes.device)[(numbers & 7).long()]
    values = torch.where(numbers >= 8, -magnitude, magnitude)
    stored = scale.view(torch.uint8)
    if cache_dtype == "nvfp4":
        of_group = stored.view(torch.float8_e4m3fn).float()
    else:
        exponent = stored.int().clamp(103, 142) if dtype == torch.float16 else stored.int()
        of_group = torch.exp2(exponent.double() - 127).masked_fill(stored == 255, math.nan)
    values = (values.double() * of_group[..., None].double()).flatten(-2)
    return (values if global_scale is None else values * torch.as_tensor(global_scale, device=codes.device)).to(dtype)


def _group_of(cache_dtype, group, head_dim):
    allowed = _GROUPS.get(cache_dtype)
    if allowed is None:
        raise ValueError(f"cache_dtype: got {cache_dtype!r}; allowed are {', '.join(map(repr, _GROUPS))}")
    group = allowed[0] if group is None else group
    if group not in allowed:
        raise ValueError(f"group: got {group}; allowed are {', '.join(map(str, allowed))} with {cache_dtype}")
    if head_dim == 0 or head_dim % group:
        raise ValueError(f"head_dim: got {head_dim}; {cache_dtype} takes multiples of its group, {group}")
    return group


def _e2m1(x):
    """To nearest even, clipped to 6."""
    size = x.abs()
    steps = (size > 0.25, size >= 0.75, size > 1.25, size >= 1.75, size > 2.5, size >= 3.5, size > 5)
    return sum(step.to(torch.uint8) for step in steps) | x.signbit().to(torch.uint8) << 3


def _packed(codes, hurt):
    codes = codes.masked_fill(hurt[..., None], 0).flatten(-2)
    return codes[..., 0::2] | codes[..., 1::2] << 4


_GROUPS = {"nvfp4": (16,), "mxfp4": (32,), "int4": (32, 64, 128)}
