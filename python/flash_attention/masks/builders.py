"""Common masks of training, as hidden rows. Lengths may be lists or tensors; nothing here waits for a GPU."""

from __future__ import annotations

import operator
from typing import Any, NoReturn

from flash_attention.arguments.keywords import refuse_keywords
from flash_attention.masks.intervals import LAST, IntervalMask


def _torch():
    import torch

    return torch


def _whole(name, value, least=0):
    """A Python int of at least that much."""
    try:
        value = operator.index(value)
    except TypeError:
        raise TypeError(f"{name}: expected an int, got {type(value).__name__}") from None
    if not least <= value <= LAST:
        raise ValueError(f"{name}: got {value}; allowed are {least} to {LAST}")
    return value


def _numbers(name, values, device):
    """int32 on a device, from lists or tensors. Numbers below 0 are refused if the host can see them."""
    torch = _torch()
    if not isinstance(values, torch.Tensor):
        if isinstance(values, str) or not hasattr(values, "__iter__"):
            raise TypeError(f"{name}: expected ints or a tensor of them, got {type(values).__name__}")
        numbers = [_whole(f"{name}[{n}]", value) for n, value in enumerate(values)]
        return torch.tensor(numbers, dtype=torch.int32, device=device)
    if values.dim() != 1 or values.is_floating_point() or values.is_complex() or values.dtype == torch.bool:
        raise TypeError(f"{name}: got {values.dtype} {list(values.shape)}; expected ints of one axis")
    if values.device.type == "cpu":
        _refuse(name, values, (values < 0) | (values > LAST), f"allowed are 0 to {LAST}")
    return values.to(device=device or values.device, dtype=torch.int32)


def _refuse(name, values, wrong, allowed):
    """Names the first wrong entry, if the host can see it."""
    if values.device.type == "cpu" and wrong.any():
        entry = int(wrong.nonzero()[0])
        raise ValueError(f"{name}[{entry}]: got {int(values[entry])}; {allowed}")


def _mask(columns, causal=False, window=(-1, -1), seq_q=None):
    """From one column of bounds for each of the 1, 2 or 4 numbers of a key."""
    torch = _torch()
    whole = torch.broadcast_tensors(*columns) if len(columns) > 1 else columns
    rows = torch.stack([column.to(torch.int32) for column in whole], dim=-1)
    return IntervalMask(rows.reshape(1, 1, *rows.shape), causal, window, seq_q)


def documents(
    cu_seqlens: Any, *, causal: bool = True, total: int | None = None, device: Any = None, **wrong: NoReturn
) -> IntervalMask:
    """Documents end to end in one sequence: a query sees its own document.

        out = attention(q, k, v, hidden_rows=documents([0, 5, 16]))

    cu_seqlens: the beginning of each document, and the end of the last, as for attention_packed(). total: keys of the
    sequence, cu_seqlens[-1] if None; keys after the last document form one more.
    """
    if wrong:
        refuse_keywords(documents, wrong)
    torch = _torch()
    starts = _numbers("cu_seqlens", cu_seqlens, device)
    if not len(starts):
        raise ValueError("cu_seqlens: got none; expected where each document begins, and the end of the last")
    _refuse("cu_seqlens", starts[:1], starts[:1] != 0, "the first document begins at 0")
    _refuse("cu_seqlens", starts, starts.diff(prepend=starts[:1]) < 0, "it must not be less than the entry before")
    total = int(starts[-1]) if total is None else _whole("total", total)
    keys = torch.arange(total, dtype=torch.int32, device=starts.device)
    which = torch.searchsorted(starts, keys, right=True)
    edges = torch.cat([starts, starts.new_tensor([LAST])])
    end = edges[which]
    if causal:
        return _mask([end], causal=True)
    begin = edges[which - 1]
    return _mask([end, torch.full_like(end, LAST), torch.zeros_like(begin), begin])


def tree(parents: Any, lengths: Any = None, *, device: Any = None, **wrong: NoReturn) -> IntervalMask:
    """A tree of texts in depth-first order (a node before its children): a query sees the path from the root to itself.

        mask = tree([-1, 0, 1, 0], [7, 4, 2, 3])  # a prompt, an answer, its continuation, another answer
        out = attention(q, k, v, hidden_rows=mask)

    parents: the parent of each node, -1 for a root. lengths: the tokens of each node, 1 if None. Causal, one bound: a key
    is hidden from the rows after the last token of its subtree.
    """
    if wrong:
        refuse_keywords(tree, wrong)
    torch = _torch()
    parents = [int(parent) for parent in parents]
    sizes = [1] * len(parents)
    if lengths is not None:
        sizes = [_whole(f"lengths[{n}]", int(length)) for n, length in enumerate(lengths)]
    if len(sizes) != len(parents):
        raise ValueError(f"lengths: got {len(sizes)} of them; there are {len(parents)} parents")
    path = []
    for node, parent in enumerate(parents):
        if not -1 <= parent < node:
            raise ValueError(f"parents[{node}]: got {parent}; allowed are -1 (a root) and earlier nodes")
        while path and path[-1] != parent:
            path.pop()
        if parent != -1 and not path:
            raise ValueError(f"parents[{node}]: got {parent}; a node comes right behind its parent or a brother's subtree")
        path.append(node)
    starts = [0]
    for size in sizes:
        starts.append(starts[-1] + size)
    end = starts[1:]  # of each subtree: children come later, so their ends are known going back
    for node in range(len(parents) - 1, -1, -1):
        if parents[node] >= 0:
            end[parents[node]] = max(end[parents[node]], end[node])
    ends = torch.tensor(end, dtype=torch.int32, device="cpu").repeat_interleave(
        torch.tensor(sizes, dtype=torch.int64, device="cpu")
    )
    return _mask([ends.to(torch.get_default_device() if device is None else device)], causal=True)


def shared_prefix(prefix: int, suffixes: Any, *, device: Any = None, **wrong: NoReturn) -> IntervalMask:
    """A prompt and several answers to it, end to end: each answer sees the prompt and itself. Causal, one bound.

    For example:

        out = attention(q, k, v, hidden_rows=shared_prefix(6, [4, 6]))
    """
    if wrong:
        refuse_keywords(shared_prefix, wrong)
    prefix = _whole("prefix", prefix)
    suffixes = [_whole(f"suffixes[{n}]", int(length)) for n, length in enumerate(suffixes)]
    return tree([-1, *(0,) * len(suffixes)], [prefix, *suffixes], device=device)


def prefix_lm(prefix: Any, total: int, *, device: Any = None, **wrong: NoReturn) -> IntervalMask:
    """The first `prefix` tokens see each other, the others are causal. prefix: an int, or one for each sequence.

    For example:

        out = attention(q, k, v, hidden_rows=prefix_lm(6, 16))
    """
    if wrong:
        refuse_keywords(prefix_lm, wrong)
    torch = _torch()
    lengths = _numbers("prefix", [prefix] if isinstance(prefix, int) else prefix, device)[:, None]
    keys = torch.arange(_whole("total", total), dtype=torch.int32, device=lengths.device)[None]
    end = torch.where(keys < lengths, 0, keys)
    rows = torch.stack([torch.zeros_like(end), end], dim=-1)
    return IntervalMask(rows[:, None].to(torch.int32))


def spans(begins: Any, ends: Any, total: int, *, device: Any = None, **wrong: NoReturn) -> IntervalMask:
    """Causal, but the tokens of a span [begin, end) see each other: images in a text. Spans are sorted and do not overlap.

    For example:

        out = attention(q, k, v, hidden_rows=spans([2, 9], [5, 12], 16))
    """
    if wrong:
        refuse_keywords(spans, wrong)
    torch = _torch()
    begins, ends = _numbers("begins", begins, device), _numbers("ends", ends, device)
    if begins.shape != ends.shape:
        raise ValueError(f"ends: got {len(ends)} of them; there are {len(begins)} begins")
    if begins.numel():
        _refuse("ends", ends, ends < begins, "a span ends behind its begin")
        _refuse("begins", begins, begins < torch.cat([begins[:1], ends[:-1]]), "spans are sorted and lie apart")
    keys = torch.arange(_whole("total", total), dtype=torch.int32, device=begins.device)
    end = keys
    if begins.numel():
        which = torch.searchsorted(begins, keys, right=True) - 1
        inside = (which >= 0) & (keys < ends[which.clamp(min=0)])
        end = torch.where(inside, begins[which.clamp(min=0)], keys)
    return _mask([torch.zeros_like(keys), end])


def block_causal(block: int, total: int, *, device: Any = None, **wrong: NoReturn) -> IntervalMask:
    """Causal by blocks of `block` tokens: a token sees all of its own block, and the blocks before it.

    For example:

        out = attention(q, k, v, hidden_rows=block_causal(4, 16))
    """
    if wrong:
        refuse_keywords(block_causal, wrong)
    torch = _torch()
    block = _whole("block", block, 1)
    keys = torch.arange(_whole("total", total), dtype=torch.int32, device=device)
    return _mask([torch.zeros_like(keys), keys // block * block])


def sink_window(sink: int, window: int, total: int, *, device: Any = None, **wrong: NoReturn) -> IntervalMask:
    """Causal: the last `window` keys, the query's own among them, and the first `sink` keys of all.

    For example:

        out = attention(q, k, v, hidden_rows=sink_window(2, 8, 16))
    """
    if wrong:
        refuse_keywords(sink_window, wrong)
    torch = _torch()
    sink, window = _whole("sink", sink), _whole("window", window)
    keys = torch.arange(_whole("total", total), dtype=torch.int32, device=device)
    return _mask([torch.where(keys < sink, LAST, (keys.long() + window).clamp(max=LAST))], causal=True)


def block_diffusion(length: int, block: int, *, device: Any = None, **wrong: NoReturn) -> IntervalMask:
    """Training of block diffusion: [noised text, clean text], each `length` tokens in blocks of `block`.

        mask = block_diffusion(8, 4)  # 8 tokens, noised and clean
        out = attention(q, k, v, hidden_rows=mask)

    A noised block sees itself and the clean blocks before it; a clean block sees itself and the clean blocks before it.
    """
    if wrong:
        refuse_keywords(block_diffusion, wrong)
    torch = _torch()
    length, block = _whole("length", length), _whole("block", block, 1)
    keys = torch.arange(2 * length, dtype=torch.int32, device=device)
    clean = keys >= length
    begin = keys % length // block * block  # of the key's block
    after = (begin + block).clamp(max=length)
    zero, last = torch.zeros_like(keys), torch.full_like(keys, LAST)
    # A noised key is visible to its own noised block. A clean key is hidden from the noised rows up to the end of its
    # block, and from the clean rows before its block.
    columns = [
        zero,
        torch.where(clean, after, begin),
        torch.where(clean, torch.full_like(keys, length), after),
        torch.where(clean, begin + length, last),
    ]
    return _mask(columns)
