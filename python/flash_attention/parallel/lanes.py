"""Two streams that the blocks of a ring go to by turns: a kernel begins on SMs where the one before has ended already.

The caller's stream exchanges keys and merges; it computes nothing meanwhile. A lane waits for it before the work of each
turn, and it waits for a lane before what a turn used is freed or read. So memory that a lane gave back is taken again by
work that comes later in that order, and no tensor needs record_stream().
"""

from contextlib import contextmanager, nullcontext
from functools import cache

import torch


@cache
def _streams(device, caller):
    """For each stream of a caller its own: memory of a lane never goes from one caller to another."""
    return [torch.cuda.Stream(device) for _ in range(2)]


def lanes_of(device, several):
    """Lanes for work on this device; one, the caller's own stream, where it cannot go on several."""
    if device.type != "cuda" or not several:
        return OneLane()
    caller = torch.cuda.current_stream(device)
    return Lanes(caller, _streams(device, caller.cuda_stream), torch.cuda.stream)


class Lanes:
    def __init__(self, caller, lanes, switch):
        self.caller, self.lanes, self.switch = caller, lanes, switch
        self.ended = {}

    def fork(self, turn):
        """What the caller's stream has done by now is there for the work of a turn."""
        self.lanes[turn % 2].wait_stream(self.caller)

    @contextmanager
    def work(self, turn):
        lane = self.lanes[turn % 2]
        with self.switch(lane):
            yield
        self.ended[turn] = lane.record_event()

    def end(self, turn):
        """The caller's stream waits for the work of a turn, not for what came after it on the other lane."""
        self.caller.wait_event(self.ended.pop(turn))

    def join(self):
        for lane in self.lanes:
            self.caller.wait_stream(lane)

    @contextmanager
    def together(self):
        """On the caller's stream, between what the lanes did before and what they do after."""
        self.join()
        with self.switch(self.caller):
            yield
        for lane in self.lanes:
            lane.wait_stream(self.caller)


class OneLane:
    """Everything where it is called."""

    work = staticmethod(lambda turn: nullcontext())
    together = staticmethod(nullcontext)

    def fork(self, turn):
        pass

    end = fork

    def join(self):
        pass
