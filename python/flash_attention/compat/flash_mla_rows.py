"""FlashMLA's rows of 8 bits: caches of latent keys whose rows have 656 or 584 bytes, made, written and read.

A row of 656 bytes: 512 columns in float8_e4m3fn, 4 scales in float32 of 128 columns each, 64 columns in bfloat16. A page of
rows of 584 bytes: for each row 448 columns in float8_e4m3fn and 64 in bfloat16, then for each row 7 scales in e8m0 of 64
columns each, and a spare byte; FlashMLA wants each page to begin at a multiple of 576 bytes.
"""

import dataclasses
from typing import Literal, NoReturn

import torch
from torch import Tensor

from flash_attention.arguments.keywords import refuse_keywords

_LARGEST = 448.0  # of float8_e4m3fn


@dataclasses.dataclass(frozen=True)
class RowFormat:
    """The layout of a row's bytes."""

    bytes: int
    codes: int  # columns of 8 bits
    block: int  # of them share a scale
    own: int  # columns of bfloat16
    side: int  # bytes of a row's scales that stand behind the rows of its page; 0: in the row, float32

    @property
    def columns(self) -> int:
        return self.codes + self.own

    @property
    def scales(self) -> int:
        return self.codes // self.block

    @property
    def row(self) -> int:
        """Bytes between two rows of a page."""
        return self.bytes - self.side


FORMATS = {656: RowFormat(656, 512, 128, 64, 0), 584: RowFormat(584, 448, 64, 64, 8)}


def new_fp8_cache(
    num_pages: int, page_size: int, row_bytes: int, device: torch.device | str | None = None, **wrong: NoReturn
) -> Tensor:
    """A cache of latent keys for flash_mla_with_kvcache: uint8 [num_pages, page_size, 1, row_bytes], of zeros.

        cache = new_fp8_cache(16, 64, 656)

    row_bytes: 656, for keys of 576 columns, or 584, for keys of 512. Pages of rows of 584 bytes begin at multiples of 576.
    """
    if wrong:
        refuse_keywords(new_fp8_cache, wrong)
    if row_bytes not in FORMATS:
        raise ValueError(f"row_bytes: got {row_bytes}; allowed are 656 and 584")
    for name, value in (("num_pages", num_pages), ("page_size", page_size)):
        if value < 0:
            raise ValueError(f"{name}: got {value}; allowed are 0 and more")
    stride = page_size * row_bytes
    if FORMATS[row_bytes].side:
        stride = -(-stride // 576) * 576
    memory = torch.zeros((num_pages, stride), dtype=torch.uint8, device=device)
    return memory.as_strided((num_pages, page_size, 1, row_bytes), (stride, row_bytes, row_bytes, 1))


@torch.no_grad()
def write_fp8_cache(
    cache: Tensor,
    slots: Tensor,
    kv: Tensor,
    scales: Literal["power_of_two", "float32"] = "power_of_two",
    **wrong: NoReturn,
) -> None:
    """Writes latent keys in 8 bits into the rows of a cache that `slots` name; all other bytes stay unchanged.

        cache = new_fp8_cache(4, 64, 656)
        pages, lengths = torch.tensor([[2, 0]]), torch.tensor([70])  # the next token of a sequence is in row 6 of page 0
        slots = pages.gather(1, (lengths // 64)[:, None])[:, 0] * 64 + lengths % 64
        write_fp8_cache(cache, slots, torch.randn(1, 576))

    Args:
        cache: uint8, int8 or float8_e4m3fn [num_pages, page_size, 1, 656 or 584]; the rows of a page are adjacent, pages
            may be anywhere. new_fp8_cache makes one.
        slots: int32 or int64 [tokens]: page * page_size + row. A token whose slot is negative, or past the cache, is not
            written. Slots must differ.
        kv: [tokens, 576] for rows of 656 bytes, [tokens, 512] for rows of 584; float32, float16 or bfloat16.
        scales: "power_of_two", the smallest power of two with which the largest column of a block fits; "float32", the
            largest column divided by 448, for rows of 656 bytes.

    docs/numerics.md has the formula. Nothing waits for a GPU.
    """
    if wrong:
        refuse_keywords(write_fp8_cache, wrong)
    data, sides, form = views_of("cache", cache)
    if not isinstance(slots, Tensor) or slots.dtype not in (torch.int32, torch.int64) or slots.dim() != 1:
        got = f"{slots.dtype} {list(slots.shape)}" if isinstance(slots, Tensor) else type(slots).__name__
        raise ValueError(f"slots: got {got}; expected int32 or int64 [tokens]")
    wanted = [slots.shape[0], form.columns]
    if not isinstance(kv, Tensor) or not kv.is_floating_point() or list(kv.shape) != wanted:
        got = f"{kv.dtype} {list(kv.shape)}" if isinstance(kv, Tensor) else type(kv).__name__
        raise ValueError(f"kv: got {got}; expected {wanted}, for rows of {form.bytes} bytes")
    if scales not in ("power_of_two", "float32"):
        raise ValueError(f"scales: got {scales!r}; allowed are 'power_of_two' and 'float32'")
    if scales == "float32" and form.side:
        raise ValueError("scales: got 'float32'; rows of 584 bytes have powers of two")
    room = data.shape[0] * data.shape[1]
    if not slots.shape[0] or not room:
        return
    codes, factors = _quantised(kv[:, : form.codes].float().unflatten(1, (form.scales, form.block)), scales)
    own = kv[:, form.codes :].to(torch.bfloat16).contiguous().view(torch.uint8)
    exponents = None
    if form.side:
        biased = torch.where(factors.isnan(), 255, factors.frexp().exponent + 126).to(torch.uint8)
        rows, exponents = torch.cat((codes, own), 1), torch.nn.functional.pad(biased, (0, form.side - form.scales))
    else:
        rows = torch.cat((codes, factors.contiguous().view(torch.uint8), own), 1)
    # A token that is not written repeats the bytes of the first written token; without one, the bytes in the cache.
    written = (slots >= 0) & (slots < room)
    source = torch.where(written, torch.arange(slots.shape[0], device=slots.device), written.int().argmax())
    slots = torch.where(written.any(), slots[source], 0).long()
    page, row = slots // data.shape[1], slots % data.shape[1]
    data[page, row] = torch.where(written.any(), rows[source], data[page, row])
    if exponents is not None:
        sides[page, row] = torch.where(written.any(), exponents[source], sides[page, row])


@torch.no_grad()
def read_fp8_cache(cache: Tensor, slots: Tensor, dtype: torch.dtype = torch.bfloat16, **wrong: NoReturn) -> Tensor:
    """The values of rows of a cache of 8 bits: [*slots.shape, 576 or 512] of `dtype`, rounded once.

        cache = new_fp8_cache(4, 64, 584)
        write_fp8_cache(cache, torch.tensor([3]), torch.ones(1, 512))
        assert (read_fp8_cache(cache, torch.tensor([3, 4])).sum(1) == torch.tensor([512, 0])).all()

    slots: int32 or int64 of any shape, page * page_size + row, each a row of the cache.
    """
    if wrong:
        refuse_keywords(read_fp8_cache, wrong)
    data, sides, form = views_of("cache", cache)
    slots = slots.long()
    page, row = slots // data.shape[1], slots % data.shape[1]
    rows = data[page, row]
    codes = rows[..., : form.codes].view(torch.float8_e4m3fn).float().unflatten(-1, (form.scales, form.block))
    if form.side:
        factors = _powers(sides[page, row][..., : form.scales])
    else:
        factors = rows[..., form.codes : form.row - 2 * form.own].contiguous().view(torch.float32)
    own = rows[..., form.row - 2 * form.own :].contiguous().view(torch.bfloat16)
    return torch.cat(((codes * factors.unsqueeze(-1)).flatten(-2).to(dtype), own.to(dtype)), -1)


def views_of(name, cache):
    """The rows of a cache by page and row, the scales after the rows of a page (or None), and the format."""
    if not isinstance(cache, Tensor) or cache.dim() != 4 or cache.shape[2] != 1 or cache.element_size() != 1:
        got = f"{cache.dtype} {list(cache.shape)}" if isinstance(cache, Tensor) else type(cache).__name__
        raise ValueError(f"{name}: got {got}; expected 8 bits [num_pages, page_size, 1, 656 or 584]")
    pages, size, _, width = cache.shape
    if width not in FORMATS:
        raise ValueError(f"{name}: got rows of {width} bytes; allowed are 656 and 584")
    form = FORMATS[width]
    data = cache.view(torch.uint8)
    if data.stride(3) != 1 or (size > 1 and data.stride(1) != width):
        raise ValueError(f"{name}: got strides {cache.stride()}; expected rows of a page side by side")
    first = data.storage_offset()
    rows = data.as_strided((pages, size, form.row), (data.stride(0), form.row, 1), first)
    if not form.side:
        return rows, None, form
    return rows, data.as_strided((pages, size, form.side), (data.stride(0), form.side, 1), first + size * form.row), form


def _quantised(blocks, scales):
    """Codes, uint8 [tokens, columns], and factors, float32 [tokens, blocks], of [tokens, blocks, columns of a block]."""
    factors = (blocks.abs().amax(-1) / _LARGEST).clamp(min=2.0**-100)
    if scales == "power_of_two":
        fraction, exponent = factors.frexp()
        power = ((exponent - (fraction == 0.5).int() + 127) << 23).view(torch.float32)
        factors = torch.where(factors.isfinite(), power, torch.nan)
    codes = (blocks / factors.unsqueeze(-1)).to(torch.float8_e4m3fn)
    return codes.flatten(1).view(torch.uint8), factors


def _powers(exponents):
    """Powers of two in e8m0 as float32."""
    shifted = (exponents.int() << 23).view(torch.float32)
    return torch.where(exponents == 0, 2.0**-127, torch.where(exponents == 255, torch.nan, shifted))
