"""Converts tensors of 16 or 32 bits to 8 bits: codes and their descales, and a rotation against outliers."""

import math
from typing import Literal, NoReturn

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
