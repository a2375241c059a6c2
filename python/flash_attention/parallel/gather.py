"""Method "all_gather": a rank first receives all keys that it sees, then attends each segment of rows in one call.

There are no partial results to merge. K and V take memory for the whole sequence, which is little with grouped heads.
"""

import torch

from flash_attention.parallel import cut
from flash_attention.parallel.layout import Segment, segments
from flash_attention.parallel.partial import States, Sum
from flash_attention.parallel.ring import add_scores, picked


class Gathered:
    """K and V of the whole sequence in its order; rows that this rank does not see are not received: they stay unset."""

    def __init__(self, call):
        self.call, self.peers, self.shape = call, call.peers, call.shape

    def places(self, source, needs):
        """[(row in the sequence, row in the message, count)] of the rows `needs` of a source."""
        found, before = [], 0
        for begin, end in needs:
            for part in segments(self.shape.seq, self.shape.world, source, self.shape.layout):
                low, high = max(begin, part.local), min(end, part.local + part.length)
                if low < high:
                    found.append((part.begin + low - part.local, before + low - begin, high - low))
            before += end - begin
        return found

    def others(self):
        return [(self.peers.rank + turn) % self.peers.world for turn in range(1, self.peers.world)]

    def tensors(self, local):
        """The tensors of `local` over the whole sequence."""
        whole = [tensor.new_empty((tensor.shape[0], self.shape.seq, *tensor.shape[2:])) for tensor in local]
        rank = self.peers.rank
        sends, receives, found = [], [], {}
        for other in self.others():
            outgoing, incoming = cut.step(self.shape, other, rank), cut.step(self.shape, rank, other)
            sends += [(picked(tensor, outgoing.needs), other) for tensor in local]
            found[other] = [tensor.new_empty((tensor.shape[0], incoming.rows, *tensor.shape[2:])) for tensor in local]
            receives += [(tensor, other) for tensor in found[other]]
        exchange = self.peers.post("K and V", sends, receives)
        for to, frm, count in self.places(rank, ((0, self.shape.seq // self.shape.world),)):
            for target, tensor in zip(whole, local, strict=True):
                target[:, to : to + count] = tensor[:, frm : frm + count]
        exchange.wait()
        for other, tensors in found.items():
            for to, frm, count in self.places(other, cut.step(self.shape, rank, other).needs):
                for target, tensor in zip(whole, tensors, strict=True):
                    target[:, to : to + count] = tensor[:, frm : frm + count]
        return whole

    def returned(self, whole, like):
        """Gradients of this rank's rows: the sum of every rank's share, in the order of the turns."""
        rank = self.peers.rank
        sends, receives, found = [], [], {}
        for other in self.others():
            mine, theirs = cut.step(self.shape, rank, other).needs, cut.step(self.shape, other, rank).needs
            for gradient in whole:
                parts = [gradient[:, to : to + count] for to, _, count in self.places(other, mine)]
                sends.append((torch.cat(parts, dim=1) if parts else gradient[:, :0], other))
            found[other] = [t.new_empty((t.shape[0], sum(e - b for b, e in theirs), *t.shape[2:])) for t in like]
            receives += [(tensor, other) for tensor in found[other]]
        exchange = self.peers.post("dK and dV", sends, receives)
        sums = [Sum(tensor) for tensor in like]
        for gradient, total in zip(whole, sums, strict=True):
            own = self.places(rank, ((0, self.shape.seq // self.shape.world),))
            total.add((0, total.like.shape[1]), torch.cat([gradient[:, to : to + n] for to, _, n in own], dim=1))
        exchange.wait()
        for other in reversed(self.others()):
            for total, tensor in zip(sums, found[other], strict=True):
                before = 0
                for begin, end in cut.step(self.shape, other, rank).needs:
                    total.add((begin, end), tensor[:, before : before + end - begin])
                    before += end - begin
        return [total.result() for total in sums]


def blocks(shape, rank):
    """One block for each segment of rows; a document that continues past a segment may need a separate one."""
    whole = Segment(0, shape.seq, 0)
    found = []
    for segment in segments(shape.seq, shape.world, rank, shape.layout):
        if not shape.documents:
            found.append(cut.band(segment, whole, shape, own=True))
            continue
        edges = zip(shape.documents, shape.documents[1:], strict=False)
        pieces = [(cut.crop(segment, *edge), cut.crop(whole, *edge)) for edge in edges]
        pieces = [(rows, keys) for rows, keys in pieces if rows]
        rows, keys = pieces[-1]
        if rows.begin + rows.length < keys.begin + keys.length:  # else bottom-right is its diagonal
            found.append(cut.band(rows, keys, shape, own=True))
            pieces.pop()
        if pieces:
            found.append(_packed(pieces, shape))
    return found


def _packed(pieces, shape):
    (first, keys), (last, _) = pieces[0], pieces[-1]
    end = last.begin + last.length
    return cut.Block(
        (first.local, last.local + last.length),
        (keys.begin, end),
        ((keys.begin, end - keys.begin),),
        shape.left,
        shape.right,
        tuple(rows.length for rows, _ in pieces),
        tuple(keys.length for _, keys in pieces),
        own=True,
    )


def forward(call, q, k, v, bias, sink):
    call.agreement.wait()
    k, v = Gathered(call).tensors((k, v))
    states = States(q, v.shape[-1])
    for block in blocks(call.shape, call.peers.rank):
        states.add(block.q, *call.forward(block, q, k, v, bias, sink))
    return states.result()


def backward(call, q, k, v, bias, sink, out, lse, dout, dlse, needs):
    gathered = Gathered(call)
    whole_k, whole_v = gathered.tensors((k, v))
    dq, dk, dv = Sum(q), Sum(whole_k), Sum(whole_v)
    dbias = torch.zeros_like(bias, dtype=torch.float32) if needs[0] else None
    dsink = torch.zeros_like(sink) if needs[1] else None
    for block in blocks(call.shape, call.peers.rank):
        found = call.backward(block, q, whole_k, whole_v, bias, sink, (out, lse), (dout, dlse), needs)
        for total, rows, gradient in ((dq, block.q, found[0]), (dk, block.kv, found[1]), (dv, block.kv, found[2])):
            total.add(rows, gradient)
        if needs[0]:
            add_scores(dbias, block, found[3])
        if needs[1] and found[4] is not None:
            dsink += found[4]
    dk, dv = gathered.returned((dk.result(), dv.result()), (k, v))
    return dq.result(), dk, dv, None if dbias is None else dbias.to(bias.dtype), dsink
