"""Method "ring": keys and values arrive block by block, the next block while the present one is attended.

In turn t rank r attends the keys of rank r - t and sends its own keys to rank r + t, only the rows that are visible
there. Nothing is forwarded: a rank sends its inputs, and receives into two buffers. The backward pass receives the same
blocks again and sends dK and dV of each straight back to its owner, who adds them in the order of the turns.
"""

from itertools import groupby

import torch

from flash_attention.parallel import cut
from flash_attention.parallel.heads import head_ranges
from flash_attention.parallel.partial import States, Sum, waits
from flash_attention.parallel.query_sums import query_sums
from flash_attention.parallel.streams import streams_for

# Rows times heads of a slice of heads: on a GPU 1024 tiles of 128 rows, eight for each SM of an H200.
SLICE_ROWS = {"cuda": 1 << 17, "cpu": 512}


class Turns:
    """The exchange of K and V of one pass: begin(t) before the work of turn t - 1, take(t) after it."""

    def __init__(self, call, k, v):
        self.call, self.k, self.v = call, k, v
        self.world, self.rank = call.peers.world, call.peers.rank
        self.flying = {}

    def source(self, turn):
        return (self.rank - turn) % self.world

    def target(self, turn):
        return (self.rank + turn) % self.world

    def incoming(self, turn):
        return cut.step(self.call.shape, self.rank, self.source(turn))

    def outgoing(self, turn):
        return cut.step(self.call.shape, self.target(turn), self.rank)

    def begin(self, turn):
        if turn >= self.world:
            return
        step, target = self.incoming(turn), self.target(turn)
        receives = [tensor.new_empty((tensor.shape[0], step.rows, *tensor.shape[2:])) for tensor in (self.k, self.v)]
        sends = [picked(tensor, self.outgoing(turn).needs) for tensor in (self.k, self.v)]
        exchange = self.call.peers.post(
            f"K and V of turn {turn}",
            [(tensor, target) for tensor in sends],
            [(tensor, self.source(turn)) for tensor in receives],
        )
        self.flying[turn] = (exchange, receives, sends)

    def take(self, turn):
        """Waits for the keys of a turn: (step, k, v)."""
        if turn == 0:
            return self.incoming(0), self.k, self.v
        exchange, (k, v), _ = self.flying.pop(turn)
        exchange.wait()
        return self.incoming(turn), k, v


def picked(tensor, ranges):
    """The rows of [batch, rows, ...] in these ranges, contiguous; a view if possible."""
    parts = [tensor[:, begin:end] for begin, end in ranges]
    if not parts:
        return tensor[:, :0]
    return parts[0].contiguous() if len(parts) == 1 else torch.cat(parts, dim=1)


def forward(call, q, k, v, bias, sink, turns=Turns):
    """(out, lse) of this rank's rows over the keys of all ranks."""
    call.agreement.wait()
    slices = head_slices(q, k)
    if len(slices) == 1:
        return _forward(call, q, k, v, bias, sink, turns)
    out = q.new_empty((*q.shape[:3], v.shape[-1]))
    lse = q.new_empty((q.shape[0], q.shape[2], q.shape[1]), dtype=torch.float32)
    for share in slices:
        heads, keys = slice(*share.q), slice(*share.kv)
        some_k, some_v = (tensor[:, :, keys].contiguous() for tensor in (k, v))  # copied once, in the form that is sent
        out[:, :, heads], lse[:, heads] = _forward(
            call.some_heads(heads), q[:, :, heads], some_k, some_v, _of_heads(bias, heads), _of_heads(sink, heads), turns
        )
    return out, lse


def _forward(call, q, k, v, bias, sink, turns):
    turns, streams = turns(call, k, v), streams_for(q.device, waits(q))
    states = States(q, v.shape[-1], streams.together)
    turns.begin(1)
    for turn in range(turns.world):
        step, keys, values = turns.take(turn)
        streams.begin(turn)
        if turn:
            streams.end(turn - 1)  # its keys' memory is that of the next ones
            turns.begin(turn + 1)
        with streams.work(turn):
            for block in step.blocks:
                states.add(block.q, *call.forward(block, q, keys, values, bias, sink))
    streams.join()
    return states.result()


def backward(call, q, k, v, bias, sink, out, lse, dout, dlse, needs, turns=Turns):
    """(dq, dk, dv, dbias, dsink) of this rank's tensors; the last two are this rank's share."""
    slices = head_slices(q, k)
    dbias = torch.zeros_like(bias, dtype=torch.float32) if needs[0] else None
    dsink = torch.zeros_like(sink) if needs[1] else None
    if len(slices) == 1:
        dk, dv = Sum(k), Sum(v)
        dq = _backward(call, q, k, v, bias, sink, (out, lse), (dout, dlse), (dk, dv, dbias, dsink), turns)
        return dq, dk.result(), dv.result(), None if dbias is None else dbias.to(bias.dtype), dsink
    dq, dk, dv = (torch.empty_like(tensor) for tensor in (q, k, v))
    for kv, shares in groupby(slices, key=lambda share: share.kv):  # a group that is cut has several consecutive shares
        keys = slice(*kv)
        some_k, some_v = (tensor[:, :, keys].contiguous() for tensor in (k, v))
        totals = Sum(some_k), Sum(some_v)
        for share in shares:
            heads = slice(*share.q)
            dq[:, :, heads] = _backward(
                call.some_heads(heads), q[:, :, heads], some_k, some_v, _of_heads(bias, heads), _of_heads(sink, heads),
                (out[:, :, heads], lse[:, heads]), (dout[:, :, heads], None if dlse is None else dlse[:, heads]),
                (*totals, _of_heads(dbias, heads), _of_heads(dsink, heads)), turns,
            )  # fmt: skip
        dk[:, :, keys], dv[:, :, keys] = (total.result() for total in totals)
    return dq, dk, dv, None if dbias is None else dbias.to(bias.dtype), dsink


def _backward(call, q, k, v, bias, sink, results, gradients, totals, turns):
    """Returns dq; adds to the sums of dk and dv, and to the gradients of bias and sink if they are wanted."""
    turns = turns(call, k, v)
    dk, dv, dbias, dsink = totals
    streams = streams_for(q.device, waits(q) and dbias is None and dsink is None)  # dbias and dsink are added to in place
    steps = [turns.incoming(turn) for turn in range(turns.world)]
    dq = query_sums(call, steps, q, k, v, bias, sink, streams.together)
    dq.begin(results, gradients)
    returning = None
    turns.begin(1)
    for turn in range(turns.world):
        step, keys, values = turns.take(turn)
        streams.begin(turn)
        if turn:
            streams.end(turn - 1)  # its keys' memory is that of the next ones
            turns.begin(turn + 1)
        dkeys, dvalues = Sum(keys), Sum(values)
        with streams.work(turn):
            for block in step.blocks:
                wanted = dbias is not None, dsink is not None
                found = dq.backward(block, q, keys, values, bias, sink, results, gradients, wanted)
                dkeys.add(block.kv, found[0])
                dvalues.add(block.kv, found[1])
                if dbias is not None:
                    add_scores(dbias, block, found[2])
                if dsink is not None and found[3] is not None:
                    dsink += found[3]
                del found
        if returning is not None:
            returning.add_to(dk, dv)
        if turn == 0:
            dk.take(dkeys)
            dv.take(dvalues)
        else:
            with streams.work(turn):
                returning = Return(turns, turn, dkeys.result(), dvalues.result())
    streams.join()
    if returning is not None:
        returning.add_to(dk, dv)
    return dq.result()


def head_slices(q, k):
    """Slices of heads that pass through the ring one after the other. A slice keeps the device busy; only it has buffers.

    The keys of a group that is cut are sent more than once, at most half as often as the group has query heads.
    """
    batch, rows, heads_q, _ = q.shape
    heads_kv = k.shape[2]
    most = min(8, heads_kv * max(1, heads_q // heads_kv // 2))
    count = max(1, min(most, batch * rows * heads_q // SLICE_ROWS.get(q.device.type, 1 << 17)))
    return [share for part in range(count) for share in head_ranges(heads_q, heads_kv, count, part)]


def _of_heads(tensor, heads):
    """A bias [batch, heads | 1, rows, seq] or a sink [heads] of some heads; a view."""
    if tensor is None or tensor.dim() == 1:
        return None if tensor is None else tensor[heads]
    return tensor if tensor.shape[1] == 1 else tensor[:, heads]


class Return:
    """dK and dV of a turn in flight: to the owner of the keys, and of this rank's keys from the rank that attended them."""

    def __init__(self, turns, turn, dk, dv):
        self.ranges = turns.outgoing(turn).needs
        rows = sum(end - begin for begin, end in self.ranges)
        source, target = turns.source(turn), turns.target(turn)
        self.sent = [gradient.contiguous() for gradient in (dk, dv)]
        self.found = [gradient.new_empty((gradient.shape[0], rows, *gradient.shape[2:])) for gradient in (dk, dv)]
        self.exchange = turns.call.peers.post(
            f"dK and dV of turn {turn}",
            [(gradient, source) for gradient in self.sent],
            [(gradient, target) for gradient in self.found],
        )

    def add_to(self, dk, dv):
        self.exchange.wait()
        for total, found in zip((dk, dv), self.found, strict=True):
            begin = 0
            for low, high in self.ranges:
                total.add((low, high), found[:, begin : begin + high - low])
                begin += high - low
        self.sent = self.found = None


def add_scores(total, block, part):
    """Adds the gradient of a block of the bias to the rows and columns that the block was cut from."""
    first, count = block.keys[0]
    place = total[..., first : first + count]
    place = place if place.shape[-2] == 1 else place[..., slice(*block.q), :]
    place += part
