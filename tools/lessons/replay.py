"""When the steps of a recording happen, if a copied tile and a product take one unit of time, and a softmax two.

The order of each thread's steps and everything it waits for are the kernel's. The lengths are a model, the same for all."""

from collections import defaultdict
from dataclasses import dataclass, field
from typing import NamedTuple

SOFTMAX = 16  # so many multiply-adds between two steps are a softmax; less is the arithmetic of an epilogue
SOFTMAX_UNITS = 2
TENSORS = "QKVO"


class Box(NamedTuple):
    """A stretch of time on a row of the picture."""

    row: str  # "copies", "products", "softmax"
    actor: int
    what: str  # Q, K, V, S, O, softmax
    number: int  # which of its kind
    begin: float
    end: float


@dataclass
class Unit:
    """Does one thing after another: the copy engine, the tensor cores."""

    free: float = 0

    def take(self, ready: float, length: float) -> tuple[float, float]:
        begin = max(ready, self.free)
        self.free = begin + length
        return begin, self.free


@dataclass
class Mbarrier:
    arrivals: int
    completed: list = field(default_factory=list)  # when
    count: int = 0
    bytes: int = 0
    time: float = 0

    def settle(self):
        if self.count == self.arrivals and self.bytes == 0:
            self.completed.append(self.time)
            self.count, self.time = 0, 0


@dataclass
class Actor:
    """A recorded thread; `weight` threads do as it does."""

    thread: int
    steps: list
    weight: int
    at: int = 0
    clock: float = 0
    waits: dict = field(default_factory=dict)  # of an mbarrier: the next phase
    counts: dict = field(default_factory=lambda: defaultdict(int))
    products: list = field(default_factory=list)  # when each group is complete
    copies: list = field(default_factory=list)
    open_copies: int = 0
    joined: int | None = None  # generation of the named barrier it waits at


def tiled(steps):
    """The steps of a thread, runs of one kind as one: a tile that is copied, a product."""
    found = []
    for name, *numbers in steps:
        if name == "load_global":
            name, numbers = "copy", []
        elif name in ("ldmatrix", "mma"):
            name, numbers = "warp_product", [numbers[1] if name == "ldmatrix" else None]
        elif name == "wgmma":
            name, numbers = "product", [numbers[0]]
        if name == "store_shared" or (name == "arithmetic" and numbers[0] < SOFTMAX):
            continue
        if found and found[-1][0] == name and name in ("copy", "copy_async", "product", "warp_product"):
            if name == "warp_product":
                found[-1][1].extend(numbers)
            found[-1][2] += 1
            continue
        found.append([name, numbers, 1])
    return found


class Replay:
    def __init__(self, steps_of: dict[int, list[tuple]], weights: dict[int, int], copied_tile: int):
        self.actors = [Actor(thread, tiled(steps), weights[thread]) for thread, steps in steps_of.items()]
        self.copied_tile = copied_tile  # single copies of a thread that make a tile
        self.engine, self.tensor = Unit(), Unit()
        self.mbarriers, self.named, self.boxes = {}, defaultdict(list), []
        self.load_bytes, self.merged = {}, {}

    def run(self) -> list[Box]:
        while True:
            for actor in sorted(self.actors, key=lambda a: a.clock):
                if actor.at < len(actor.steps) and self.step(actor):
                    break
            else:
                break
        left = [actor.thread for actor in self.actors if actor.at < len(actor.steps)]
        if left:
            raise RuntimeError(
                f"threads {left} wait for ever at {[a.steps[a.at] for a in self.actors if a.thread in left]}"
            )
        return sorted(self.boxes, key=lambda box: (box.begin, box.row, box.actor))

    def step(self, actor: Actor) -> bool:
        """Takes a step, unless the actor has to wait for something that nobody has done yet."""
        name, numbers, count = actor.steps[actor.at]
        taken = getattr(self, name)(actor, numbers, count) if hasattr(self, name) else None
        if taken is False:
            return False
        actor.at += 1
        return True

    def box(self, row, actor, what, begin, end, number=None):
        if number is None:
            number = actor.counts[what]
            actor.counts[what] += 1
        self.boxes.append(Box(row, actor.thread, what, number, begin, end))

    def arithmetic(self, actor, numbers, count):
        self.box("softmax", actor, "softmax", actor.clock, actor.clock + SOFTMAX_UNITS)
        actor.clock += SOFTMAX_UNITS

    # Copies by the threads themselves: 08 waits for each, cp.async does not. A group is K and V of a tile, or Q.

    def copy(self, actor, numbers, count):
        tiles = count / self.copied_tile
        begin, actor.clock = self.engine.take(actor.clock, tiles)
        self.name_copies(actor, begin, tiles)

    def copy_async(self, actor, numbers, count):
        actor.open_copies += count

    def copy_async_commit(self, actor, numbers, count):
        tiles, actor.open_copies = actor.open_copies / self.copied_tile, 0
        begin, end = self.engine.take(actor.clock, tiles)
        actor.copies.append(end)
        self.name_copies(actor, begin, tiles)

    def copy_async_wait(self, actor, numbers, count):
        done = actor.copies[: len(actor.copies) - numbers[0]]
        actor.clock = max([actor.clock, *done])

    def name_copies(self, actor, begin, tiles):
        if tiles <= 1:
            self.box("copies", actor, "Q", begin, begin + tiles)
        else:
            self.box("copies", actor, "K", begin, begin + tiles / 2)
            self.box("copies", actor, "V", begin + tiles / 2, begin + tiles)

    # The products of mma.sync: the warp waits. V is read transposed.

    def warp_product(self, actor, numbers, count):
        begin, actor.clock = self.tensor.take(actor.clock, 1)
        transposed = [number for number in numbers if number is not None]
        if count > 8:  # fewer are Q on its way to registers
            self.box("products", actor, "O" if transposed[-1] else "S", begin, actor.clock)
        else:
            self.tensor.free = actor.clock = begin

    # Products of a warpgroup: the tensor cores take them in the order of their issue. P, the operand of O, is in registers.

    def product(self, actor, numbers, count):
        begin, end = self.tensor.take(actor.clock, 1)
        actor.products.append(end)
        self.box("products", actor, "O" if numbers[0] else "S", begin, end)

    def wgmma_wait(self, actor, numbers, count):
        actor.clock = max([actor.clock, *actor.products[: len(actor.products) - numbers[0]]])

    # Barriers.

    def barrier(self, actor, numbers, count):
        name, threads, waits = numbers
        needed = threads or sum(a.weight for a in self.actors)
        generations = self.named[name]
        if actor.joined is None:
            if not generations or generations[-1][0] == needed:
                generations.append([0, 0])
            generations[-1][0] += actor.weight
            generations[-1][1] = max(generations[-1][1], actor.clock)
            if not waits:
                return None
            actor.joined = len(generations) - 1
        arrived, time = generations[actor.joined]
        if arrived < needed:
            return False
        actor.joined, actor.clock = None, max(actor.clock, time)
        return None

    def mbarrier_init(self, actor, numbers, count):
        self.mbarriers[numbers[0]] = Mbarrier(numbers[1])

    def mbarrier_arrive(self, actor, numbers, count):
        address, expected = numbers
        barrier = self.mbarriers[address]
        barrier.count += 1
        barrier.bytes += expected
        barrier.time = max(barrier.time, actor.clock)
        if expected:
            loads = 0
            for name, words, _ in actor.steps[actor.at + 1 :]:
                if name != "bulk_load" or words[2] != address:
                    break
                loads += 1
            self.load_bytes[address] = expected // loads
            begin, end = self.engine.take(actor.clock, 1)  # of all its boxes: a tile
            barrier.time = end
            tensor = TENSORS[actor.steps[actor.at + 1][1][0]]
            self.box("copies", actor, tensor, begin, end)
        barrier.settle()

    def bulk_load(self, actor, numbers, count):
        barrier = self.mbarriers[numbers[2]]
        barrier.bytes -= self.load_bytes[numbers[2]]
        barrier.settle()

    def bulk_store(self, actor, numbers, count):
        if numbers[3] == 0:  # the first panel of columns: a tile is stored at once
            self.box("stores", actor, "O", actor.clock, actor.clock + 1, number=0)

    def mbarrier_wait(self, actor, numbers, count):
        address, parity = numbers
        phase = actor.waits.setdefault(address, -parity)  # before the first phase it has parity 1: a stage that is empty
        completed = self.mbarriers[address].completed
        if phase >= len(completed):
            return False
        if phase >= 0:
            actor.clock = max(actor.clock, completed[phase])
        actor.waits[address] += 1
        return None
