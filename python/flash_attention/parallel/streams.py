"""Two streams that the blocks of a ring go to by turns: a kernel begins on SMs where the one before has ended already.

The caller's stream exchanges keys and merges; it computes nothing meanwhile. A side stream waits for it before the work of
each turn, and it waits for a side stream before what a turn used is freed or read. So memory that a side stream gave back
is taken again by work that comes later in that order, and no tensor needs record_stream().
"""

from contextlib import contextmanager, nullcontext
from functools import cache

import torch


@cache
def _sides(device, caller):
    """For each stream of a caller its own: memory of a side stream never goes from one caller to another. Events are used
    again: a wait is for what was recorded last before it."""
    streams = [torch.cuda.Stream(device) for _ in range(2)]
    return [(stream, torch.cuda.Event(), torch.cuda.Event()) for stream in streams]


def streams_for(device, several):
    """Streams for work on this device; one, the caller's own, where it cannot go on several."""
    if device.type != "cuda" or not several:
        return OneStream()
    caller = torch.cuda.current_stream(device)
    return TwoStreams(caller, _sides(device, caller.cuda_stream), torch.cuda.stream)


class TwoStreams:
    """sides: two of (stream, event of its begin, event of its end); switch(stream): a context in which it is current."""

    def __init__(self, caller, sides, switch):
        self.caller, self.sides, self.switch = caller, sides, switch

    def begin(self, turn):
        """What the caller's stream has done by now is visible to the work of a turn."""
        stream, begun, _ = self.sides[turn % 2]
        begun.record(self.caller)
        stream.wait_event(begun)

    @contextmanager
    def work(self, turn):
        stream, _, ended = self.sides[turn % 2]
        with self.switch(stream):
            yield
        ended.record(stream)

    def end(self, turn):
        """The caller's stream waits for the work of a turn, not for what the other stream does meanwhile."""
        self.caller.wait_event(self.sides[turn % 2][2])

    def join(self):
        for stream, _, ended in self.sides:
            ended.record(stream)
            self.caller.wait_event(ended)

    @contextmanager
    def together(self):
        """On the caller's stream, between what the others did before and what they do after."""
        self.join()
        with self.switch(self.caller):
            yield
        for turn in range(2):
            self.begin(turn)


class OneStream:
    """Everything where it is called."""

    work = staticmethod(lambda turn: nullcontext())
    together = staticmethod(nullcontext)

    def begin(self, turn):
        pass

    end = begin

    def join(self):
        pass
