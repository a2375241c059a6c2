"""Method "ring": keys and values come block by block, the next one while the present one is attended.

In turn t rank r attends the keys of rank r - t and sends its own to rank r + t, those rows alone that are seen there.
Nothing is forwarded: what is sent is the input itself, and what is received has two buffers. In the backward pass the
same blocks come again, and dK and dV of each go straight back to its owner, who adds them in the order of the turns.
"""

import torch

from flash_attention.parallel import cut
from flash_attention.parallel.partial import States, Sum


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
        """(step, k, v) of a turn."""
        if turn == 0:
            return self.incoming(0), self.k, self.v
        exchange, (k, v), _ = self.flying.pop(turn)
        exchange.wait()
        return self.incoming(turn), k, v


def picked(tensor, ranges):
    """Rows of [batch, rows, ...] in some ranges, contiguous; a view where it can be."""
    parts = [tensor[:, begin:end] for begin, end in ranges]
    if not parts:
        return tensor[:, :0]
    return parts[0].contiguous() if len(parts) == 1 else torch.cat(parts, dim=1)


def forward(call, q, k, v, bias, sink, turns=None):
    """(out, lse) of this rank's rows over the keys of all."""
    turns, states = turns or Turns(call, k, v), States(q, v.shape[-1])
    call.agreement.wait()
    turns.begin(1)
    for turn in range(turns.world):
        step, keys, values = turns.take(turn)
        if turn:
            turns.begin(turn + 1)
        for block in step.blocks:
            states.add(block.q, *call.forward(block, q, keys, values, bias, sink))
    return states.result()


def backward(call, q, k, v, bias, sink, out, lse, dout, dlse, needs, turns=None):
    """(dq, dk, dv, dbias, dsink) of this rank's tensors; the last two are this rank's share."""
    turns = turns or Turns(call, k, v)
    dq, dk, dv = Sum(q), Sum(k), Sum(v)
    dbias = torch.zeros_like(bias, dtype=torch.float32) if needs[0] else None
    dsink = torch.zeros_like(sink) if needs[1] else None
    returning = None
    turns.begin(1)
    for turn in range(turns.world):
        step, keys, values = turns.take(turn)
        if turn:
            turns.begin(turn + 1)
        dkeys, dvalues = Sum(keys), Sum(values)
        for block in step.blocks:
            found = call.backward(block, q, keys, values, bias, sink, (out, lse), (dout, dlse), needs)
            dq.add(block.q, found[0])
            dkeys.add(block.kv, found[1])
            dvalues.add(block.kv, found[2])
            if needs[0]:
                add_scores(dbias, block, found[3])
            if needs[1] and found[4] is not None:
                dsink += found[4]
        if returning is not None:
            returning.add_to(dk, dv)
        if turn == 0:
            dk, dv = dkeys, dvalues
        else:
            returning = Return(turns, turn, dkeys.result(), dvalues.result())
    if returning is not None:
        returning.add_to(dk, dv)
    return dq.result(), dk.result(), dv.result(), None if dbias is None else dbias.to(bias.dtype), dsink


class Return:
    """dK and dV of a turn on their way to the owner of the keys, and those of the own keys from the other side."""

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
    """Adds the gradient of a block of a bias where the block was cut from."""
    first, count = block.keys[0]
    place = total[..., first : first + count]
    place = place if place.shape[-2] == 1 else place[..., slice(*block.q), :]
    place += part
