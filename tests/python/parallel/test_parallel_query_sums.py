"""One sum of dQ for all blocks of a pass: the protocol of its parts, by a binding that does what they say in float64."""

from types import SimpleNamespace

import pytest
import torch
from flash_attention.parallel import cut, query_sums
from flash_attention.parallel.call import Call
from flash_attention.parallel.layout import segments

ROWS, WORLD, RANK = 8, 3, 1


class Binding:
    """Parts of a pass on the memory that they are given, [rows, heads, dim] of float64; scores have no scale."""

    def __init__(self):
        self.parts = []

    def backward(self, tensors, options, results, gradients, seed, offset, stream, allocate, *, part):
        assert options.kernel == "backward/sm90"
        kind, rows, first, number = part
        self.parts.append((kind, number))
        dout, dlse, dq, dk, dv, _, _ = gradients
        sums = allocate(rows * tensors.q.shape[2] * tensors.q.shape[3] * 8).view(torch.float64)
        sums = sums.view(rows, *tensors.q.shape[2:])
        out, lse = results
        if kind == "rows":
            assert tensors.q.shape[1] == rows and lse.is_contiguous()
            sums.zero_()
            self.delta = (dout * out).sum(-1)[0]
            if dlse is not None:
                self.delta = self.delta - dlse[0].transpose(0, 1)
        elif kind == "dq":
            dq.copy_(sums[None])
        else:
            q, k, v = (t[0].transpose(0, 1) for t in (tensors.q, tensors.k, tensors.v))
            scores = q @ k.transpose(1, 2)
            if options.causal:
                assert q.shape[1] == k.shape[1]
                scores = scores.masked_fill(torch.ones_like(scores, dtype=torch.bool).triu(1), -torch.inf)
            p = (scores - lse[0][..., None]).exp()
            at = slice(first, first + q.shape[1])
            ds = p * (dout[0].transpose(0, 1) @ v.transpose(1, 2) - self.delta[at].transpose(0, 1)[..., None])
            sums[at] += (ds @ k).transpose(0, 1)
            dk.copy_((ds.transpose(1, 2) @ q).transpose(0, 1)[None])
            dv.copy_((p.transpose(1, 2) @ dout[0].transpose(0, 1)).transpose(0, 1)[None])


def whole_gradients(q, k, v, dout, dlse):
    """Of this rank's rows over the keys of all, in the order of the sequence."""
    q, k, v = (t.clone().requires_grad_() for t in (q, k, v))
    places = torch.cat([torch.arange(s.begin, s.begin + s.length) for s in segments(ROWS * WORLD, WORLD, RANK, "zigzag")])
    scores = torch.einsum("bqhd,bkhd->bhqk", q, k).masked_fill(torch.arange(ROWS * WORLD) > places[:, None], -torch.inf)
    lse = scores.logsumexp(-1)
    out = torch.einsum("bhqk,bkhd->bqhd", scores.softmax(-1), v)
    (out * dout).sum().add((lse * dlse).sum()).backward()
    return out.detach(), lse.detach(), q.grad, k.grad, v.grad


def test_parts_of_all_blocks_are_the_gradient(monkeypatch):
    torch.manual_seed(0)
    binding = Binding()
    monkeypatch.setattr(query_sums, "_core", binding)
    shape = cut.Shape(ROWS * WORLD, WORLD, "zigzag", -1, 0)
    call = Call(SimpleNamespace(rank=RANK, world=WORLD), shape, None, scale=1.0)
    q, dout = (torch.randn(1, ROWS, 2, 4, dtype=torch.float64) for _ in range(2))
    k, v = (torch.randn(1, ROWS * WORLD, 2, 4, dtype=torch.float64) for _ in range(2))
    dlse = torch.randn(1, 2, ROWS, dtype=torch.float64)
    out, lse, *expected = whole_gradients(q, k, v, dout, dlse)
    steps = [cut.step(shape, RANK, source) for source in range(WORLD)]
    sums = query_sums.SharedSums(call, steps, q, k, v)
    dk, dv = torch.zeros_like(k), torch.zeros_like(v)
    # A dout whose strides TMA cannot take, as that of a sum over another axis.
    sums.begin((out, lse), (dout.transpose(1, 2).contiguous().transpose(1, 2)[..., [0, 1, 2, 3]], dlse))
    for step in steps:
        theirs = segments(ROWS * WORLD, WORLD, step.source, "zigzag")
        places = torch.cat([torch.arange(s.begin, s.begin + s.length) for s in theirs])
        places = torch.cat([places[slice(*need)] for need in step.needs]) if step.needs else places[:0]
        for block in step.blocks:
            keys = places[slice(*block.kv)]
            received = k[:, places], v[:, places]
            found = sums.backward(block, q, *received, None, None, (out, lse), (dout, dlse), (False, False))
            dk[:, keys] += found[0]
            dv[:, keys] += found[1]
            assert found[2:] == (None, None)
    for got, want in zip((sums.result(), dk, dv), expected, strict=True):
        assert (got - want).abs().max() < 1e-12
    numbers = [number for kind, number in binding.parts if kind == "block"]
    assert binding.parts[0][0] == "rows" and binding.parts[-1][0] == "dq"
    assert numbers == list(range(len(numbers))) and len(numbers) == WORLD


@pytest.mark.parametrize("refused", [NotImplementedError, ValueError])
def test_blocks_that_are_no_parts_have_a_dq_each(monkeypatch, refused):
    def explain(tensors, options, backward, *, part):
        assert options.kernel == "backward/sm90" and part[0] == "block"
        if part[3] == 2:
            raise refused("few key heads")
        return ""

    monkeypatch.setattr(query_sums, "_core", SimpleNamespace(explain=explain))
    shape = cut.Shape(ROWS * WORLD, WORLD, "zigzag", -1, 0)
    call = Call(SimpleNamespace(rank=RANK, world=WORLD), shape, None)
    q = torch.zeros(1, ROWS, 2, 8)
    blocks = [block for source in range(WORLD) for block in cut.step(shape, RANK, source).blocks]
    assert query_sums._are_parts(call, blocks[:2], q, q, q)
    assert not query_sums._are_parts(call, blocks, q, q, q)


def test_a_cpu_has_no_parts():
    shape = cut.Shape(ROWS * WORLD, WORLD, "zigzag", -1, 0)
    call = Call(SimpleNamespace(rank=RANK, world=WORLD), shape, None)
    q = torch.zeros(1, ROWS, 2, 8)
    assert isinstance(query_sums.query_sums(call, [], q, q, q, None, None, None), query_sums.OwnSums)


@pytest.mark.parametrize(
    ("tensor", "kept"),
    [
        (torch.zeros(1, 4, 2, 8), True),
        (torch.zeros(1, 4, 6, 8)[:, :, :2], True),
        (torch.zeros(1).expand(1, 4, 2, 8), False),
        (torch.zeros(1, 4, 2, 12)[..., :8], False),
        (torch.zeros(1, 4, 8, 2).transpose(2, 3), False),
    ],
)
def test_strides_for_tma(tensor, kept):
    found = query_sums._for_tma(tensor)
    assert torch.equal(found, tensor) and (found is tensor) == kept and found.stride(-1) == 1
