"""Method "ulysses": rows are exchanged for heads; a rank attends the whole sequence for its heads and sends rows back.

Rows keep their indices, so dropout and ALiBi, which depend on them, are as on one device. Any number of heads works.
"""

import itertools

import torch
from torch.autograd.function import once_differentiable

from flash_attention.functional import attention, attention_packed
from flash_attention.parallel.heads import head_ranges
from flash_attention.parallel.layout import join, split


def attend(call, q, k, v, sink, options):
    """(out, lse) of this rank's rows; differentiable. options: dropout_p, seed, offset, alibi_slopes as in attention()."""
    call.agreement.wait()
    peers, layout = call.peers, call.shape.layout
    heads_q, heads_kv = q.shape[2], k.shape[2]
    mine = [head_ranges(heads_q, heads_kv, peers.world, rank) for rank in range(peers.world)]
    ranges_q, ranges_kv = ([[share[side] for share in each] for each in mine] for side in (0, 1))
    q, k, v = RowsToHeads.apply(peers, layout, (ranges_q, ranges_kv, ranges_kv), q, k, v)
    outs, lses = [], []
    at_q = at_kv = 0
    for share in mine[peers.rank]:
        count_q, count_kv = share.q[1] - share.q[0], share.kv[1] - share.kv[0]
        out, lse = _whole(
            call, q[:, :, at_q : at_q + count_q], *(t[:, :, at_kv : at_kv + count_kv] for t in (k, v)),
            share.q[0], heads_q, sink, options,
        )  # fmt: skip
        outs.append(out)
        lses.append(lse.transpose(1, 2)[..., None])
        at_q, at_kv = at_q + count_q, at_kv + count_kv
    if not outs:  # this rank has no head, and still takes part
        nothing = sum(tensor.sum().float() for tensor in (q, k, v, sink) if tensor is not None)
        outs, lses = [q.new_empty((*q.shape[:2], 0, v.shape[-1])) + nothing], [nothing.expand(*q.shape[:2], 0, 1)]
    out, lse = HeadsToRows.apply(
        peers, layout, ranges_q, heads_q, torch.cat(outs, dim=2).to(q.dtype), torch.cat(lses, dim=2)
    )
    return out, lse[..., 0].transpose(1, 2)


def _whole(call, q, k, v, first_head, heads, sink, options):
    """One call for some heads and all rows. Dropout draws the bits of these heads in the whole problem."""
    dropout_p = options["dropout_p"]
    count = q.shape[2]
    if dropout_p and (heads % count or first_head % count):
        group = count // k.shape[2]
        found = [
            _whole(call, q[:, :, h : h + 1], *(t[:, :, h // group : h // group + 1] for t in (k, v)), first_head + h,
                   heads, sink, options)
            for h in range(count)
        ]  # fmt: skip
        return torch.cat([out for out, _ in found], dim=2), torch.cat([lse for _, lse in found], dim=1)
    slopes, rows = options["alibi_slopes"], slice(first_head, first_head + count)
    common = {
        "scale": call.scale,
        "softcap": call.softcap,
        "window": (call.shape.left, call.shape.right),
        "sink": None if sink is None else sink[rows],
        "alibi_slopes": None if slopes is None else slopes[..., rows].contiguous(),
        "deterministic": call.deterministic,
        "kernel": call.kernel,
        "return_lse": True,
    }
    if dropout_p:
        common |= {"dropout_p": dropout_p, "seed": options["seed"], "offset": options["offset"]}
    elif not call.shape.documents:
        return attention(q, k, v, key_lengths=call.key_lengths, **common)
    return _packed(call, q, k, v, first_head, heads, common)


def _packed(call, q, k, v, first_head, heads, common):
    """One packed call. Dropout numbers a head as sequence * heads + head, so empty sequences before and between the real
    ones give each head its number among all heads."""
    batch, seq, count, _ = q.shape
    stride, begin = (heads // count, first_head // count) if "dropout_p" in common else (1, 0)
    documents = call.shape.documents or tuple(b * seq for b in range(batch + 1))
    lengths = [0] * ((len(documents) - 1) * stride)
    lengths[begin::stride] = [end - start for start, end in itertools.pairwise(documents)]
    starts = torch.tensor([0, *lengths], dtype=torch.int32).cumsum(0, dtype=torch.int32).to(q.device)
    slopes, key_lengths = common.pop("alibi_slopes"), call.key_lengths
    if slopes is not None and slopes.dim() == 2:
        slopes = _spread(slopes, len(lengths), begin, stride)
    if key_lengths is not None:
        key_lengths = _spread(key_lengths, len(lengths), begin, stride)
    out, lse = attention_packed(
        *(t.flatten(0, 1) for t in (q, k, v)), starts, max_seqlen_q=max(lengths), max_seqlen_kv=max(lengths),
        key_lengths=key_lengths, alibi_slopes=slopes, **common,
    )  # fmt: skip
    return out.unflatten(0, (batch, seq)), lse.unflatten(1, (batch, seq)).transpose(0, 1)


def _spread(values, count, begin, stride):
    """The batch's entries at the indices of their sequences."""
    spread = values.new_zeros((count, *values.shape[1:]))
    spread[begin::stride] = values
    return spread


class RowsToHeads(torch.autograd.Function):
    """For each tensor: [batch, rows, heads, dim] of this rank -> [batch, seq, heads of this rank, dim].

    ranges[i][rank] are the heads of tensor i that belong to a rank. All tensors are in one node, so that every rank's
    backward pass sends them in the same order.
    """

    @staticmethod
    def forward(ctx, peers, layout, ranges, *tensors):
        ctx.peers, ctx.layout, ctx.ranges, ctx.heads = peers, layout, ranges, [tensor.shape[2] for tensor in tensors]
        return to_heads(tensors, peers, layout, ranges)

    @staticmethod
    @once_differentiable
    def backward(ctx, *gradients):
        return None, None, None, *to_rows(gradients, ctx.peers, ctx.layout, ctx.ranges, ctx.heads)


class HeadsToRows(torch.autograd.Function):
    """The inverse exchange; all tensors have the same heads."""

    @staticmethod
    def forward(ctx, peers, layout, ranges, heads, *tensors):
        ctx.peers, ctx.layout, ctx.ranges = peers, layout, [ranges] * len(tensors)
        return to_rows(tensors, peers, layout, ctx.ranges, [heads] * len(tensors))

    @staticmethod
    @once_differentiable
    def backward(ctx, *gradients):
        return None, None, None, None, *to_heads(gradients, ctx.peers, ctx.layout, ctx.ranges)


def to_heads(tensors, peers, layout, ranges):
    sends, found = [], []
    for tensor, taken in zip(tensors, ranges, strict=True):
        batch, rows, _, dim = tensor.shape
        count = sum(high - low for low, high in taken[peers.rank])
        sends.append(
            [torch.cat([tensor[:, :, low:high] for low, high in each] or [tensor[:, :, :0]], dim=2) for each in taken]
        )
        found.append([tensor.new_empty((batch, rows, count, dim)) for _ in taken])
    _exchange(peers, "rows for heads", sends, found)
    return tuple(join(each, layout=layout) for each in found)


def to_rows(tensors, peers, layout, ranges, heads):
    sends, found = [], []
    for tensor, taken in zip(tensors, ranges, strict=True):
        batch, seq, _, dim = tensor.shape
        counts = [sum(high - low for low, high in each) for each in taken]
        sends.append([split(tensor, peers.world, rank, layout=layout) for rank in range(peers.world)])
        found.append([tensor.new_empty((batch, seq // peers.world, count, dim)) for count in counts])
    _exchange(peers, "heads for rows", sends, found)
    return tuple(map(_heads_joined, found, ranges, heads))


def _heads_joined(parts, ranges, heads):
    """All heads; those that several ranks had (gradients of shared keys) are added in float32, in the order of ranks."""
    taken = [pair for each in ranges for pair in each]
    shared = sum(high - low for low, high in taken) > heads
    dtype = torch.promote_types(parts[0].dtype, torch.float32) if shared else parts[0].dtype
    total = parts[0].new_zeros((*parts[0].shape[:2], heads, parts[0].shape[-1]), dtype=dtype)
    for each, part in zip(ranges, parts, strict=True):
        at = 0
        for low, high in each:
            total[:, :, low:high] += part[:, :, at : at + high - low]
            at += high - low
    return total.to(parts[0].dtype)


def _exchange(peers, what, sends, found):
    """Sends and receives one list of tensors for each rank; a rank's own tensors are not copied."""
    others = [rank for rank in range(peers.world) if rank != peers.rank]
    exchange = peers.post(
        what,
        [(each[r].contiguous(), r) for r in others for each in sends],
        [(each[r], r) for r in others for each in found],
    )
    for mine, each in zip(sends, found, strict=True):
        each[peers.rank] = mine[peers.rank]
    exchange.wait()
