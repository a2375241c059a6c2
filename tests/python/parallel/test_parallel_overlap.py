"""The order of a ring's work: keys of the next turn travel while the present ones are attended, and no row in vain."""

import torch
from flash_attention.parallel import cut, ring
from flash_attention.parallel.call import Call

ROWS, WORLD = 16, 4


class Recorder:
    """Peers that send nothing and keep a list of what happened."""

    def __init__(self, rank):
        self.rank, self.world, self.events = rank, WORLD, []

    def post(self, what, sends, receives):
        self.events.append(("post", what, sum(tensor.shape[1] for tensor, _ in sends)))
        for tensor, _ in receives:
            tensor.zero_()
        return self.Waiting(self, what)

    class Waiting:
        def __init__(self, peers, what):
            self.peers, self.what = peers, what

        def wait(self):
            self.peers.events.append(("wait", self.what))


class Agreed:
    def wait(self):
        pass


def events_of(rank, monkeypatch, passes):
    peers = Recorder(rank)
    for name in ("forward", "backward"):
        original = getattr(Call, name)

        def watched(self, block, *arguments, original=original):
            peers.events.append(("work",))
            return original(self, block, *arguments)

        monkeypatch.setattr(Call, name, watched)
    call = Call(peers, cut.Shape(ROWS * WORLD, WORLD, "zigzag", -1, 0), Agreed())
    q, k, v = (torch.randn(1, ROWS, heads, 8) for heads in (2, 1, 1))
    out, lse = ring.forward(call, q, k, v, None, None)
    if passes == "both":
        peers.events.clear()
        ring.backward(call, q, k, v, None, None, out, lse, torch.ones_like(out), None, (False, False))
    return peers.events


def test_the_next_keys_travel_during_the_work(monkeypatch):
    events = events_of(1, monkeypatch, "forward")
    names = [event[:2] for event in events]
    work = [index for index, event in enumerate(events) if event[0] == "work"]
    assert len(work) == WORLD
    for turn in range(1, WORLD):
        posted, waited = (names.index((kind, f"K and V of turn {turn}")) for kind in ("post", "wait"))
        assert posted < work[turn - 1] < waited < work[turn]
    assert max(sum(n[0] == "post" for n in names[:i]) - sum(n[0] == "wait" for n in names[:i]) for i in work) == 1


def test_rows_that_are_sent_are_seen(monkeypatch):
    """To earlier ranks all rows, to later ones the first half (zigzag, causal); K and V each."""
    for rank in range(WORLD):
        sent = [event[2] for event in events_of(rank, monkeypatch, "forward") if event[0] == "post"]
        expected = [2 * (ROWS if (rank + turn) % WORLD < rank else ROWS // 2) for turn in range(1, WORLD)]
        assert sent == expected, rank
        monkeypatch.undo()


def test_gradients_travel_during_the_work(monkeypatch):
    events = events_of(2, monkeypatch, "both")
    names = [event[:2] for event in events]
    work = [index for index, event in enumerate(events) if event[0] == "work"]
    for turn in range(1, WORLD - 1):
        posted, waited = (names.index((kind, f"dK and dV of turn {turn}")) for kind in ("post", "wait"))
        assert work[turn] < posted < work[turn + 1] < waited
