"""Sequences with a common beginning: its keys are read once for all of them, and the results are merged exactly."""

from collections import namedtuple
from typing import Any, NamedTuple, NoReturn

import torch
from torch import Tensor

from flash_attention.arguments.keywords import refuse_keywords
from flash_attention.functional import attention
from flash_attention.merge import merge_states
from flash_attention.torch_cache import attention_over_cache


def shared_prefix_attention(
    q: Tensor,
    prefix_k: Any,
    prefix_v: Any,
    k: Tensor,
    v: Tensor,
    *,
    prefix_lengths: Any = None,
    seqused_kv: Tensor | None = None,
    page_table: Tensor | None = None,
    causal: bool = True,
    softcap: float = 0.0,
    sink: Tensor | None = None,
    scale: float | None = None,
    return_lse: bool = False,
    prefix_groups: Any = None,
    prefix_table: Any = None,
    bit_mask: Any = None,
    **wrong: NoReturn,
) -> Any:
    """attention() of each sequence over the prefix of its group, then its own keys.

        out = shared_prefix_attention(q[:, :1], k[:1], v[:1], k, v)  # one prompt, two answers so far

    The queries of a group attend to its prefix as one sequence, so it is read once for all of them. Each sequence
    attends to its own keys separately, and merge_states() merges both. Differentiable without pages and prefix_groups.

    With several levels (a system prompt, prompts that begin with it, answers to each) prefix_k and prefix_v are lists, the
    outermost level first, and so are the other given prefix_ arguments; None in a list means the same as outside of one.

    Args:
        q: [batch, seq_q, heads_q, head_dim]; without prefix_groups, the sequences of a group are adjacent.
        prefix_k, prefix_v: [groups, prefix, heads_kv, head_dim]; groups divides batch, and is 1 if all share one prefix.
            With prefix_table pages, [num_pages, page_size, heads_kv, head_dim], which may be those of k and v.
        k, v: each sequence's own keys and values after the prefix, [batch, seq_kv, heads_kv, head_dim]; with page_table
            pages, [num_pages, page_size, heads_kv, head_dim].
        prefix_lengths: int32 [groups]; keys of each prefix. All if None.
        seqused_kv: int32 [batch]; how many of its own keys a sequence has. All if None.
        page_table: int32 [batch, pages].
        causal: over the own keys, with the last query at the last key; all of the prefix is visible.
        softcap, sink, scale, return_lse: as in attention().
        prefix_groups: int32 [batch]; the group of each sequence, in any order; -1 if it has no prefix. Like lengths and
            tables it is read on the device, so a CUDA graph may be replayed with other groups. Groups that no sequence
            names cost nothing.
        prefix_table: int32 [groups, pages].
        bit_mask: masks.BitMask of the own keys, such as trees of drafts (masks.draft_tree()).
    """
    if wrong:
        refuse_keywords(shared_prefix_attention, wrong)
    levels = _levels(prefix_k, prefix_v, prefix_lengths, prefix_groups, prefix_table)
    for level in levels:
        _check_shapes(q, level.k, level.v)
    options = {"softcap": softcap, "scale": scale, "return_lse": True}
    states = [_over_prefix(q, level, options) for level in levels]
    own = {"causal": causal, "sink": sink, "seqused_kv": seqused_kv, **options}
    if page_table is None and bit_mask is None:
        states.append(attention(q, k, v, **own))
    else:
        states.append(attention_over_cache(q, k, v, page_table=page_table, bit_mask=bit_mask, **own))
    out, lse = merge_states(*zip(*states, strict=True))
    return (out, lse) if return_lse else out


class SharedPages(NamedTuple):
    """The result of shared_pages(), on the device of the table."""

    prefix_lengths: Tensor
    prefix_table: Tensor
    page_table: Tensor
    seqused_kv: Tensor


def shared_pages(
    page_table: Tensor,
    seqused_kv: Tensor,
    prefix_groups: Tensor,
    *,
    num_groups: int,
    page_size: int,
    **wrong: NoReturn,
) -> SharedPages:
    """The common first pages of a group's sequences: those that beams, or answers to one prompt, share.

        table = torch.tensor([[5, 7, 1], [5, 7, 2]], dtype=torch.int32)  # two beams: pages 5 and 7 are the prompt's
        lengths, groups = torch.tensor([9, 10], dtype=torch.int32), torch.tensor([0, 0], dtype=torch.int32)
        shared = shared_pages(table, lengths, groups, num_groups=1, page_size=4)
        pages = torch.randn(8, 4, 4, 64)  # of 4 keys, 4 heads
        out = shared_prefix_attention(
            q[:, :1], pages, pages, pages, pages, prefix_groups=groups, **shared._asdict()
        )

    page_table: int32 [batch, pages]. seqused_kv: int32 [batch]; all keys of each sequence, including shared ones.
    prefix_groups: int32 [batch], below num_groups; -1 for a sequence that shares nothing.

    The shared pages of a group are the leading pages that all of its sequences have. Each sequence keeps at least one
    key of its own, so the page of its last key is never shared. A group of one sequence shares nothing. Nothing is read
    on the
    host: a CUDA graph may contain the call, and beams may fork, end and change their pages between replays.
    """
    if wrong:
        refuse_keywords(shared_pages, wrong)
    batch, pages = page_table.shape
    group = _known(prefix_groups, num_groups).long()
    rows = torch.arange(batch, device=page_table.device)
    first = torch.full((num_groups + 1,), batch, device=page_table.device).scatter_reduce_(0, group, rows, "amin")
    members = torch.zeros(num_groups + 1, dtype=torch.int64, device=page_table.device).scatter_add_(
        0, group, torch.ones_like(rows)
    )
    first = first.clamp(max=max(batch - 1, 0))
    alike = (page_table == page_table[first[group]]).int().cumprod(1).sum(1)
    whole = (seqused_kv.long() - 1).clamp(min=0) // page_size  # a sequence's last page is its own
    common = torch.full_like(first, pages).scatter_reduce_(0, group, torch.minimum(alike, whole), "amin")
    common = torch.where(members > 1, common, 0)
    common[num_groups] = 0
    own = common[group]
    places = (own[:, None] + torch.arange(pages, device=page_table.device)).clamp(max=max(pages - 1, 0))
    return SharedPages(
        (common[:num_groups] * page_size).int(),
        page_table[first[:num_groups]],
        page_table.gather(1, places),
        (seqused_kv - own * page_size).int(),
    )


_Level = namedtuple("_Level", "k v lengths groups table")


def _levels(*given):
    """One _Level for each level, from arguments that are lists with an entry a level, or tensors for a single level."""
    if not isinstance(given[0], (list, tuple)):
        return [_Level(*given)]
    names = "prefix_k", "prefix_v", "prefix_lengths", "prefix_groups", "prefix_table"
    columns = []
    for name, values in zip(names, given, strict=True):
        if values is None:
            values = [None] * len(given[0])
        if not isinstance(values, (list, tuple)) or len(values) != len(given[0]):
            got = f"{len(values)} of them" if isinstance(values, (list, tuple)) else type(values).__name__
            raise ValueError(f"{name}: got {got}; expected a list of {len(given[0])}, one for each level of prefix_k")
        columns.append(values)
    if not columns[0]:
        raise ValueError("prefix_k: got no level; expected one at least")
    return [_Level(*level) for level in zip(*columns, strict=True)]


def _over_prefix(q, level, options):
    """(out, lse) of the queries over one level."""
    batch, seq_q, heads, head_dim = q.shape
    if level.groups is None:
        groups = len(level.k if level.table is None else level.table)
        if groups < 1 or batch % groups:
            name = "prefix_k" if level.table is None else "prefix_table"
            raise ValueError(f"{name}: has {groups} groups; allowed are those that divide the batch, {batch}")
        together = q.reshape(groups, batch // groups * seq_q, heads, head_dim)
        run = attention if level.table is None else attention_over_cache
        pages = {} if level.table is None else {"page_table": level.table}
        out, lse = run(together, level.k, level.v, seqused_kv=level.lengths, **pages, **options)
        lse = lse.unflatten(-1, (-1, seq_q)).transpose(1, 2).reshape(batch, heads, seq_q)
        return out.reshape(batch, seq_q, heads, -1), lse
    return _over_groups(q, level, options)


def _over_groups(q, level, options):
    """The same for sequences in any order: those of a group are sorted together, and a group is a packed sequence."""
    batch, seq_q = q.shape[:2]
    table, lengths = level.table, level.lengths
    ints = {"dtype": torch.int32, "device": q.device}
    if table is None:  # a group's keys are a page
        table = torch.arange(len(level.k), **ints)[:, None]
    groups, page_size = len(table), level.k.shape[1]
    if level.groups.shape != (batch,):
        raise ValueError(f"prefix_groups: got shape {list(level.groups.shape)}; expected [{batch}]")
    if lengths is None:
        lengths = torch.full((groups,), table.shape[1] * page_size, **ints)
    sorted_groups, order = _known(level.groups, groups).sort(stable=True)
    starts = torch.searchsorted(sorted_groups, torch.arange(groups + 1, **ints), out_int32=True) * seq_q
    out, lse = attention_over_cache(
        q[order].flatten(0, 1), level.k, level.v, seqused_kv=lengths, page_table=table, cu_seqlens_q=starts,
        max_seqlen_q=batch * seq_q, **options,
    )  # fmt: skip
    back = order.argsort()
    return out.unflatten(0, (batch, seq_q))[back], lse.unflatten(1, (batch, seq_q))[:, back].transpose(0, 1)


def _known(groups, count):
    """Groups, with numbers that do not exist replaced by `count`, which is past all groups."""
    return torch.where((groups >= 0) & (groups < count), groups, count).to(torch.int32)


def _check_shapes(q, prefix_k, prefix_v):
    for name, tensor in (("q", q), ("prefix_k", prefix_k), ("prefix_v", prefix_v)):
        if not isinstance(tensor, Tensor):
            raise TypeError(f"{name}: expected a tensor of torch, got {type(tensor).__name__}")
        if tensor.dim() != 4:
            raise ValueError(
                f"{name}: got shape {list(tensor.shape)}; expected 4 axes, [batch or groups, seq, heads, head_dim]"
            )
