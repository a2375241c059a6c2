"""Two streams that the blocks of a ring alternate between: a kernel begins on the SMs that the previous one has left.

The caller's stream only exchanges keys and merges. A side stream waits for the caller's stream before the work of each
turn; the caller's stream waits for the side stream before the memory of that turn is freed or its results are read. So
freed memory of a side stream is only reused by later work in this order, and no tensor needs record_stream().
"""

from contextlib import contextmanager, nullcontext
from functools import cache

import torch


@cache
def _sides(device, caller):
    """Side streams for one stream of a caller, so that memory of a side stream never passes from one caller to another.

    The events are reused: a wait is for the last record before it.
    """
    streams = [torch.cuda.Stream(device) for _ in range(2)]
    return [(stream, torch.cuda.Event(), torch.cuda.Event()) for stream in streams]


def streams_for(device, several):
    """Streams for work on this device; only the caller's if the work cannot use several."""
    if device.type != "cuda" or not several:
        return OneStream()
    caller = torch.cuda.current_stream(device)
    return TwoStreams(caller, _sides(device, caller.cuda_stream), torch.cuda.stream)


class TwoStreams:
    """sides: two of (stream, event of its begin, event of its end); switch(stream): a context in which it is current."""

    def __init__(self, caller, sides, switch):
        self.caller, self.sides, self.switch = caller, sides, switch

    def begin(self, turn):
        """The context of a turn's work, which sees everything that is on the caller's stream by now."""
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
        """The caller's stream waits for the work of this turn, not for the other stream's."""
        self.caller.wait_event(self.sides[turn % 2][2])

    def join(self):
        for stream, _, ended in self.sides:
            ended.record(stream)
            self.caller.wait_event(ended)

    @contextmanager
    def together(self):
        """The context of work on the caller's stream, after all earlier and before all later work of the side streams."""
        self.join()
        with self.switch(self.caller):
            yield
        for turn in range(2):
            self.begin(turn)


class OneStream:
    """All work on the caller's stream."""

    work = staticmethod(lambda turn: nullcontext())
    together = staticmethod(nullcontext)

    def begin(self, turn):
        pass

    end = begin

    def join(self):
        pass
