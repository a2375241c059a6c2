"""Blocks on two streams: what must wait for what, by streams that keep an account of it instead of running anything."""

from contextlib import contextmanager

import pytest
import torch
from flash_attention.parallel import cut, ring
from flash_attention.parallel.call import Call
from flash_attention.parallel.streams import OneStream, TwoStreams, streams_for

ROWS, WORLD = 16, 6  # more blocks than one fold takes


class Stream:
    """What is certain to have ended when the next operation of this stream begins."""

    def __init__(self):
        self.before = set()

    def do(self, what):
        self.before = self.before | {what}

    def wait_event(self, event):
        self.before = self.before | event.before


class Event:
    """Used again and again: what counts is what was recorded last."""

    before = frozenset()

    def record(self, stream):
        self.before = frozenset(stream.before)


class Machine:
    """The streams of a call; operations know what came before them."""

    def __init__(self):
        self.caller = self.current = Stream()
        self.sides = [(Stream(), Event(), Event()) for _ in range(2)]
        self.seen = {}

    @contextmanager
    def switch(self, stream):
        outer, self.current = self.current, stream
        yield
        self.current = outer

    def do(self, what):
        self.seen[what] = self.current.before
        self.current.do(what)

    def streams(self, device, several):
        return TwoStreams(self.caller, self.sides, self.switch)


class Merging:
    """In place of the fused kernels: parts wait, and a fold is an operation."""

    PARTS = 4

    def __init__(self, machine):
        self.machine, self.folds = machine, 0

    def merge(self, parts, rows, dtype, states):
        self.machine.do(("fold", self.folds))
        self.folds += 1
        first = parts[0][1]
        out = first.new_zeros((first.shape[0], rows, *first.shape[2:]), dtype=dtype)
        return out, first.new_zeros((first.shape[0], first.shape[2], rows)) if states else None


class Peers:
    def __init__(self, machine, rank):
        self.machine, self.rank, self.world = machine, rank, WORLD

    def post(self, what, sends, receives):
        self.machine.do(("post", what))
        return Exchange(self.machine, what)


class Exchange:
    def __init__(self, machine, what):
        self.machine, self.what = machine, what

    def wait(self):
        self.machine.do(("arrived", self.what))


class Agreed:
    def wait(self):
        pass


@pytest.fixture
def machine(monkeypatch):
    made, turns = Machine(), iter(range(100))
    monkeypatch.setattr(ring, "streams_for", made.streams)
    monkeypatch.setattr("flash_attention.parallel.partial._kernels", lambda tensor: kernels)
    kernels = Merging(made)

    def work(self, block, q, k, v, *rest):
        made.do(("work", next(turns)))
        rows, keys = block.q[1] - block.q[0], block.kv[1] - block.kv[0]
        dq, dk, dv = (t[:, :1].expand(-1, n, -1, -1) for t, n in ((q, rows), (k, keys), (v, keys)))
        return (dq, dq[..., 0].transpose(1, 2)) if len(rest) == 2 else (dq, dk, dv, None, None)

    monkeypatch.setattr(Call, "forward", work)
    monkeypatch.setattr(Call, "backward", work)
    return made


def run(machine, which):
    call = Call(Peers(machine, 2), cut.Shape(ROWS * WORLD, WORLD, "zigzag", -1, 0), Agreed())
    q, k, v = (torch.zeros(1, ROWS, 2, 8) for _ in range(3))
    machine.do("inputs")
    if which == "forward":
        ring.forward(call, q, k, v, None, None)
    else:
        lse = torch.zeros(1, 2, ROWS)
        ring.backward(call, q, k, v, None, None, q, lse, q, None, (False, False))
    machine.do("the caller goes on")
    return machine.seen


@pytest.mark.parametrize("which", ["forward", "backward"])
def test_what_waits_for_what(machine, which):
    seen = run(machine, which)
    blocks = sorted(name for name in seen if name[0] == "work")
    assert len(blocks) == WORLD
    for turn in range(WORLD):
        work = seen["work", turn]
        assert "inputs" in work
        if turn:
            assert ("arrived", f"K and V of turn {turn}") in work
        if turn in (1, 2, 3):  # later ones come after a fold, which needs all before it
            assert ("work", turn - 1) not in work  # they run beside each other
        if turn > 1:
            # The keys of this turn were received where those of two turns ago had been.
            assert ("work", turn - 2) in seen["post", f"K and V of turn {turn}"]
    assert set(blocks) <= seen["the caller goes on"]
    folds = [name for name in seen if name[0] == "fold"]
    assert folds and all(fold in seen["the caller goes on"] for fold in folds)


def test_a_fold_is_between_the_streams(machine):
    seen = run(machine, "forward")
    first = seen["fold", 0]
    assert {("work", turn) for turn in range(4)} <= first
    # The parts' memory is free then: no stream may take it before they were read.
    assert ("fold", 0) in seen["work", 5]


def test_gradients_are_sent_after_they_are_made(machine):
    seen = run(machine, "backward")
    for turn in range(1, WORLD):
        assert ("work", turn) in seen["post", f"dK and dV of turn {turn}"]
    returned = {("arrived", f"dK and dV of turn {turn}") for turn in range(1, WORLD)}
    assert returned <= seen["the caller goes on"]


def test_one_stream_off_a_gpu():
    assert isinstance(streams_for(torch.device("cpu"), True), OneStream)
    assert isinstance(streams_for(torch.device("cuda"), False), OneStream)


def test_one_stream_where_gradients_are_added_in_place(machine, monkeypatch):
    asked = []
    monkeypatch.setattr(ring, "streams_for", lambda device, several: asked.append(several) or OneStream())
    q = torch.zeros(1, ROWS, 2, 8)
    call = Call(Peers(machine, 2), cut.Shape(ROWS * WORLD, WORLD, "zigzag", -1, 0), Agreed())
    sink = torch.zeros(2)
    ring.backward(call, q, q, q, None, sink, q, torch.zeros(1, 2, ROWS), q, None, (False, True))
    ring.backward(call, q, q, q, None, None, q, torch.zeros(1, 2, ROWS), q, None, (False, False))
    assert asked == [False, True]
