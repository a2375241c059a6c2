"""dQ of a backward pass over blocks of keys.

SharedSums: the kernel of Hopper GPUs adds each block's share to one sum in float32, and computes the statistics of the
rows once. OwnSums: each block has its own dQ, and these are added up; for every other device and option.
"""

import torch

from flash_attention import _core
from flash_attention.parallel.cut import Block
from flash_attention.parallel.partial import Sum
from flash_attention.pytorch import ops

_KERNEL = "backward/sm90"
_answers, _MOST_ANSWERS = {}, 1000


def query_sums(call, steps, q, k, v, bias, sink, together):
    """The sums for the blocks of `steps`, which are all turns: every block is checked before the first one runs."""
    plain = all(each is None for each in (bias, sink, call.kernel, call.mask, call.key_lengths))
    if not (q.is_cuda and plain) or ops.is_watched(q):
        return OwnSums(call, q, together)
    tensors = [(tensor.shape, tensor.stride()) for tensor in (q, k, v)]
    key = (call.shape, call.peers.rank, *tensors, q.dtype, q.device, call.scale, call.softcap, call.deterministic)
    if key not in _answers:
        if len(_answers) == _MOST_ANSWERS:
            _answers.clear()
        _answers[key] = _are_parts(call, [block for step in steps for block in step.blocks], q, k, v)
    return SharedSums(call, steps, q, k, v) if _answers[key] else OwnSums(call, q, together)


def _are_parts(call, blocks, q, k, v):
    """Whether the kernel takes all of these blocks as parts of one pass."""
    try:
        for number, block in enumerate(blocks):
            count = block.kv[1] - block.kv[0]
            rows = q[:, slice(*block.q)]
            tensors, options = call.bind(block, rows, k[:, :count], v[:, :count], None, None)
            part = ("block", q.shape[1], block.q[0], number)
            _core.explain(tensors, options._replace(kernel=_KERNEL), True, part=part)
    except (NotImplementedError, ValueError):
        return False
    return True


class OwnSums:
    def __init__(self, call, q, together):
        self.call, self.dq = call, Sum(q, together)

    def begin(self, results, gradients):
        pass

    def backward(self, block, q, k, v, bias, sink, results, gradients, wanted):
        """(dk, dv, dbias, dsink) of a block."""
        dq, *found = self.call.backward(block, q, k, v, bias, sink, results, gradients, wanted)
        self.dq.add(block.q, dq)
        return found

    def result(self):
        return self.dq.result()


class SharedSums:
    """Three kinds of parts on one workspace: "rows" first; a "block" for each, in any order or at once; "dq" last."""

    def __init__(self, call, steps, q, k, v):
        self.call, self.q, self.dq = call, q, torch.empty_like(q)
        self.keys = k[:, :1], v[:, :1]  # stand in for the keys in parts without any: a problem must have keys
        self.ranges = {block.q for step in steps for block in step.blocks}
        self.rows, self.number, self.memory = q.shape[1], 0, None

    def begin(self, results, gradients):
        self.rest = results, (_for_tma(gradients[0]), gradients[1])
        self.lse = {rows: results[1][..., slice(*rows)].contiguous() for rows in self.ranges}
        self._all_rows("rows")

    def backward(self, block, q, k, v, bias, sink, results, gradients, wanted):
        (begin, end), (first, last) = block.q, block.kv
        k, v = k[:, first:last], v[:, first:last]
        tensors, options = self.call.bind(block, q[:, begin:end], k, v, None, None)
        found = torch.empty_like(k), torch.empty_like(v)
        dout = self.rest[1][0][:, begin:end]
        some = (results[0][:, begin:end], self.lse[block.q]), dout, None, self.dq[:, begin:end]
        self._run(("block", self.rows, begin, self.number), tensors, options, *some, *found)
        self.number += 1
        return *found, None, None

    def result(self):
        self._all_rows("dq")
        return self.dq

    def _all_rows(self, part):
        (out, lse), (dout, dlse) = self.rest
        block = Block((0, self.rows), (0, 1), ((0, 1),))
        tensors, options = self.call.bind(block, self.q, *self.keys, None, None)
        found = (torch.empty_like(tensor) for tensor in self.keys)
        self._run((part, self.rows, 0, 0), tensors, options, (out, lse.contiguous()), dout, dlse, self.dq, *found)

    def _run(self, part, tensors, options, results, dout, dlse, dq, dk, dv):
        tensors, stream = (tensors, 0) if ops.HAS_EXCHANGE else ops.detached(tensors)
        dlse = None if dlse is None else dlse.contiguous()
        options, found = options._replace(kernel=_KERNEL), (dout, dlse, dq, dk, dv, None, None)
        _core.backward(tensors, options, results, found, 0, 0, stream, self._workspace, part=part)

    def _workspace(self, size):
        if self.memory is None:
            self.memory = ops.workspace(self.q, size)
        return self.memory


def _for_tma(tensor):
    """The tensor, copied if the kernel's TMA copies do not support its strides."""
    axes = zip(tensor.shape, tensor.stride(), strict=True)
    good = tensor.stride(-1) == 1 and all(n == 1 or (stride > 0 and stride % 8 == 0) for n, stride in list(axes)[:-1])
    return tensor if good else tensor.contiguous()
