"""The cost of a context-parallel call: bytes and FLOPs of every turn, their overlap, the expected efficiency.

A model, not a measurement. The block of a turn is computed at `tflops`, merging it reads and writes its rows in memory,
and its keys are sent at the bandwidth of their link. A rank's clock moves to whichever of these ends last, in the order
in which ring.py posts and waits.
"""

from dataclasses import dataclass, field
from typing import NoReturn

from flash_attention.arguments.keywords import refuse_keywords
from flash_attention.parallel import cut
from flash_attention.parallel.heads import head_ranges
from flash_attention.parallel.layout import check_layout

BACKWARD = 2.5  # times the FLOPs of the forward pass


@dataclass(frozen=True)
class Links:
    """GB/s that a GPU sends and receives at once, within a node of `node` GPUs and beyond; seconds to the first byte."""

    inside: float
    outside: float
    node: int = 8
    latency: float = 10e-6

    def seconds(self, rank, other, size):
        bandwidth = self.inside if rank // self.node == other // self.node else self.outside
        return (self.latency + size / (bandwidth * 1e9)) if size else 0.0


# Per GPU and direction, from the vendors' data sheets: NVLink 4 and 5, InfiniBand NDR (400 Gbit/s) and HDR (200 Gbit/s).
H100_NODES = Links(450.0, 50.0)
B200_NODES = Links(900.0, 50.0)
HDR_NODES = Links(300.0, 25.0)


@dataclass(frozen=True)
class Turn:
    """One rank's work on the keys of one source. ready: when they have arrived; begin, end: when the work runs."""

    source: int
    flops: float
    received: int
    ready: float
    begin: float
    end: float


@dataclass
class Plan:
    """print() it, or read its fields. Times in seconds, of the slowest of the modelled ranks."""

    title: str
    method: str
    layout: str
    flops: float = 0.0  # of all ranks
    seconds: float = 0.0
    ideal: float = 0.0  # the same FLOPs, evenly shared and without waiting
    waiting: float = 0.0
    received: int = 0  # bytes, by the rank that waits longest
    kept: int = 0  # bytes of other ranks' K and V that a rank holds at once
    balance: float = 1.0  # FLOPs of the busiest rank over the mean
    turns: list[Turn] = field(default_factory=list)

    @property
    def efficiency(self) -> float:
        return self.ideal / self.seconds if self.seconds else 1.0

    def __str__(self):
        lines = [
            self.title,
            f"  method {self.method}, layout {self.layout}: {self.flops / 1e12:.4g} TFLOP in {self.seconds * 1e3:.4g} ms, "
            f"efficiency {self.efficiency:.1%}",
            f"  a rank receives {_bytes(self.received)}, holds {_bytes(self.kept)} of others' keys and values at once, "
            f"waits {self.waiting * 1e3:.3g} ms; busiest rank {self.balance:.3g} of the mean",
        ]
        if self.turns:
            lines.append("  turn  source      GFLOP     received   keys ready       begins         ends")
        for number, turn in enumerate(self.turns):
            if 8 <= number < len(self.turns) - 7:
                lines += ["   ..."] if number == 8 else []
                continue
            times = "".join(f"{moment * 1e3:10.4g} ms" for moment in (turn.ready, turn.begin, turn.end))
            lines.append(f"  {number:4d}{turn.source:8d}{turn.flops / 1e9:11.4g}{_bytes(turn.received):>13}{times}")
        return "\n".join(lines)


def plan(
    seq: int,
    heads: int,
    world: int,
    bandwidth: float | Links = H100_NODES,
    *,
    heads_kv: int | None = None,
    head_dim: int = 128,
    batch: int = 1,
    causal: bool = True,
    window: tuple[int, int] = (-1, -1),
    method: str = "ring",
    layout: str = "zigzag",
    element_bytes: int = 2,
    tflops: float = 600.0,
    memory: float = 4000.0,
    backward: bool = False,
    show: bool = True,
    **wrong: NoReturn,
) -> Plan:
    """The expected course of context_attention(); printed unless show=False.

        expected = plan(65536, heads=16, world=8)  # and prints it

    Args:
        seq: the length of the whole sequence; a multiple of 2 * world (zigzag).
        bandwidth: GB/s of every GPU in one direction, or Links.
        tflops: the speed of one GPU on one block: measure it with bench/multi_gpu.py --steps.
        memory: GB/s of a GPU's own memory, which limits the merging of partial results.
        backward: the backward pass, whose turns also send dK and dV back.
    """
    if wrong:
        refuse_keywords(plan, wrong)
    check_layout(layout)
    links = bandwidth if isinstance(bandwidth, Links) else Links(bandwidth, bandwidth)
    model = _Model(
        seq, heads, heads_kv or heads, head_dim, batch, element_bytes, tflops * 1e12, links, memory * 1e9, backward
    )
    shape = cut.Shape(seq, world, layout, window[0], 0 if causal else window[1])
    courses = {"ring": model.ring, "all_gather": model.gathered, "ulysses": model.ulysses}
    if method not in courses:
        raise ValueError(f"method: got {method!r}; allowed are {', '.join(map(repr, courses))}")
    found = courses[method](shape)
    found.title = (
        f"{'backward' if backward else 'forward'}: {seq} tokens x {batch}, {heads}/{heads_kv or heads} heads of "
        f"{head_dim}, {world} GPUs at {tflops:g} TFLOP/s, "
        f"{links.inside:g} GB/s within {links.node}, {links.outside:g} GB/s beyond"
    )
    if show:
        print(found)
    return found


class _Model:
    def __init__(self, seq, heads, heads_kv, head_dim, batch, element_bytes, rate, links, memory, backward):
        self.seq, self.heads, self.heads_kv, self.rate, self.links = seq, heads, heads_kv, rate, links
        self.per_pair = 4.0 * batch * heads * head_dim * (BACKWARD if backward else 1.0)
        self.head_row = batch * head_dim * element_bytes  # bytes of a row of one head
        self.row = 2 * heads_kv * self.head_row  # of K and V
        self.ways = 2 if backward else 1
        # Seconds per row. A part is written and read; one pass over the float32 sum merges three parts (fused.py).
        self.merge = heads * batch * head_dim * (element_bytes + 8 / 3) / memory

    def ring(self, shape):
        found = Plan("", "ring", shape.layout)
        work = {}
        for rank in _looked_at(shape.world):
            turns = self.turns(shape, rank)
            work[rank] = sum(turn.flops for turn in turns)
            if turns[-1].end >= found.seconds:
                found.seconds, found.turns = turns[-1].end, turns
        self.finish(found, shape, work)
        found.waiting = sum(b.begin - a.end for a, b in zip(found.turns, found.turns[1:], strict=False))
        found.received = sum(turn.received for turn in found.turns)
        sizes = [turn.received // self.ways for turn in found.turns]
        found.kept = max((a + b for a, b in zip(sizes, [*sizes[1:], 0], strict=True)), default=0)
        return found

    def turns(self, shape, rank):
        """The clock of a rank: the keys of the next turn are requested when the work of this one begins."""
        found, now, asked = [], 0.0, 0.0
        for step in cut.steps(shape, rank):
            received = 0 if step.source == rank else step.rows * self.row * self.ways
            ready = asked + self.links.seconds(rank, step.source, received)
            begin = max(now, ready)
            flops = self.per_pair * sum(pairs(block) for block in step.blocks)
            asked = begin if found else 0.0
            now = begin + flops / self.rate
            if found:
                now += self.merge * sum(block.q[1] - block.q[0] for block in step.blocks)
            found.append(Turn(step.source, flops, received, ready, begin, now))
        return found

    def gathered(self, shape):
        found = Plan("", "all_gather", shape.layout)
        work = {}
        for rank in _looked_at(shape.world):
            steps = cut.steps(shape, rank)
            work[rank] = self.per_pair * sum(pairs(block) for step in steps for block in step.blocks)
            sizes = [(step.source, step.rows * self.row * self.ways) for step in steps[1:]]
            waiting = sum(self.links.seconds(rank, source, size) for source, size in sizes)
            if waiting + work[rank] / self.rate >= found.seconds:
                found.seconds, found.waiting = waiting + work[rank] / self.rate, waiting
                found.received = sum(size for _, size in sizes)
                found.kept = found.received // self.ways
        self.finish(found, shape, work)
        return found

    def ulysses(self, shape):
        found = Plan("", "ulysses", shape.layout)
        rows, others = shape.seq // shape.world, shape.world - 1
        shares = [head_ranges(self.heads, self.heads_kv, shape.world, rank) for rank in range(shape.world)]
        counts, kv = ([sum(share[side][1] - share[side][0] for share in each) for each in shares] for side in (0, 1))
        share = max(counts)
        whole = cut.Shape(shape.seq, 1, shape.layout, shape.left, shape.right)
        total = self.per_pair * sum(pairs(block) for block in cut.step(whole, 0, 0).blocks)
        size = rows * (2 * share + 2 * max(kv)) * self.head_row * self.ways  # a rank's part of q, k, v and, back, of out
        found.waiting = sum(self.links.seconds(0, other, size) for other in range(1, shape.world))
        found.received, found.kept = size * others, size * others // self.ways
        found.flops, found.ideal = total, total / shape.world / self.rate
        found.balance = share * shape.world / self.heads
        found.seconds = found.ideal * found.balance + found.waiting
        return found

    def finish(self, found, shape, work):
        whole = cut.Shape(shape.seq, 1, shape.layout, shape.left, shape.right)
        found.flops = self.per_pair * sum(pairs(block) for block in cut.step(whole, 0, 0).blocks)
        found.ideal = found.flops / shape.world / self.rate
        found.balance = max(work.values()) / (found.flops / shape.world)


def _looked_at(world):
    """The modelled ranks: at the ends and in the middle, the extremes of every layout."""
    return sorted({0, world // 2, world - 1})


def pairs(block):
    """(query, key) pairs that a block attends."""
    rows, keys = block.q[1] - block.q[0], block.kv[1] - block.kv[0]
    seen = rows * keys if block.right < 0 else _sum_of_clamped(block.right + 1, rows, keys)
    return seen - (0 if block.left < 0 else _sum_of_clamped(-block.left, rows, keys))


def _sum_of_clamped(shift, count, high):
    """sum over i < count of min(max(i + shift, 0), high)"""

    def below(limit):  # sum over i < limit of max(i + shift, 0)
        first = max(0, -shift)
        number = max(0, limit - first)
        return number * (first + shift) + number * (number - 1) // 2

    full = max(0, min(count, high - shift))  # rows before the bound is reached
    return below(full) + max(0, count - max(full, 0)) * high if full < count else below(count)


def _bytes(size):
    for unit in ("B", "kB", "MB", "GB"):
        if size < 1000:
            return f"{size:.4g} {unit}"
        size /= 1000
    return f"{size:.4g} TB"
