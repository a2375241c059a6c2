"""How long a call takes: warm-up, then samples whose median and spread are kept."""

import statistics
import time
from contextlib import nullcontext

import torch

FLUSH_BYTES = 256 << 20  # more than any L2 of today
SLEEP_CYCLES = 8_000_000  # the GPU waits this long while the CPU queues the samples, so launches are not timed
MOST_SLEEP_CYCLES = 64 * SLEEP_CYCLES
QUEUED = 20  # samples while it waits
TURNS, PAUSE_SECONDS = 5, 0.01
LONG_SECONDS = 0.05
MATMUL = 512  # rows and columns of the product between calls: a millisecond or two of a model's other work


class Timer:
    """Times calls that alternate, so that a drift of clocks and temperature, or other work of the machine, hits all alike.

    timer.warmed(call) runs a call for the first time and prepares it; timer.in_turn([warmed, ...]) gives one
    {"ms", "p10", "p90", "samples"} for each; timer(call) does both for a single one. On a GPU each sample is between two
    events, with L2 emptied before it, and calls change after every sample; graph=True replays a call as a CUDA graph. On a
    CPU a call keeps its turn for a while, and a pause before each turn lets the threads of the one before fall asleep.
    """

    def __init__(self, device, seconds=0.15, warmup_seconds=0.05, graph=False):
        self.device, self.seconds, self.warmup_seconds, self.graph = device, seconds, warmup_seconds, graph
        self.flush = torch.empty(FLUSH_BYTES // 4, dtype=torch.int32, device="cuda") if device == "cuda" else None
        self.side = torch.cuda.Stream() if graph else None
        self.sleep_cycles = SLEEP_CYCLES

    def __call__(self, call):
        return self.in_turn([self.warmed(call)])[0]

    def stream(self):
        """Where calls are made and timed. A graph is captured on it: a backward pass runs where its forward pass did."""
        return torch.cuda.stream(self.side) if self.side else nullcontext()

    def warmed(self, call):
        """(call, seconds it takes)"""
        call()
        if self.flush is None:
            return call, 0.0
        call = captured(call, self.side) if self.graph else call
        torch.cuda.synchronize()
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        call()
        end.record()
        torch.cuda.synchronize()
        each = begin.elapsed_time(end) / 1e3
        for _ in range(min(200, int(self.warmup_seconds / max(each, 1e-6)))):
            call()
        return call, each

    def in_turn(self, calls):
        samples = [[] for _ in calls]
        if self.flush is None:
            self.cpu_turns([call for call, _ in calls], samples)
        else:
            turns = schedule([count(self.seconds, each) for _, each in calls])
            for start in range(0, len(turns), QUEUED):
                self.queued(calls, turns[start : start + QUEUED], samples)
        return [summary(mine) for mine in samples]

    def cpu_turns(self, calls, samples):
        for _ in range(TURNS):
            for call, mine in zip(calls, samples, strict=True):
                time.sleep(PAUSE_SECONDS)
                call()
                end = time.perf_counter() + self.seconds / TURNS
                while not mine or time.perf_counter() < end:
                    begin = time.perf_counter()
                    call()
                    mine.append((time.perf_counter() - begin) * 1e3)

    def between_matmuls(self, calls):
        """As in a model, on a CPU: the calls by turns, a matrix product after each and no pause anywhere, so that a call
        finds the threads of torch as torch leaves them. {"interleaved_ms", ..._p10, ..._p90, "matmul_ms"} of each; the last
        is the product that follows the call."""
        a, b = (torch.randn(MATMUL, MATMUL) for _ in range(2))
        samples, products = [[] for _ in calls], [[] for _ in calls]
        end = time.perf_counter() + self.seconds * len(calls)
        while len(samples[-1]) < 5 or time.perf_counter() < end:
            for (call, _), mine, product in zip(calls, samples, products, strict=True):
                begin = time.perf_counter()
                call()
                middle = time.perf_counter()
                torch.mm(a, b)
                mine.append((middle - begin) * 1e3)
                product.append((time.perf_counter() - middle) * 1e3)
        found = []
        for mine, product in zip(samples, products, strict=True):
            of_call = summary(mine)
            found.append({f"interleaved_{name}": value for name, value in of_call.items()})
            found[-1]["matmul_ms"] = summary(product)["ms"]
        return found

    def queued(self, calls, turns, samples):
        """One sample of calls[i] for every i of turns, queued while the GPU waits. Where it has come to a sample before
        that was queued to its end, the sample is one of the host: it is taken again, behind a longer wait."""
        while turns:
            events = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in turns]
            torch.cuda._sleep(self.sleep_cycles)
            too_late = []
            for turn, (begin, end) in zip(turns, events, strict=True):
                self.flush.zero_()
                begin.record()
                calls[turn][0]()
                end.record()
                too_late.append(begin.query())
            torch.cuda.synchronize()
            if self.sleep_cycles == MOST_SLEEP_CYCLES:  # a call that waits for the GPU itself, or a host that is stuck
                too_late = [False] * len(turns)
            for turn, (begin, end), late in zip(turns, events, too_late, strict=True):
                if not late:
                    samples[turn].append(begin.elapsed_time(end))
            turns = [turn for turn, late in zip(turns, too_late, strict=True) if late]
            if turns:
                self.sleep_cycles = min(2 * self.sleep_cycles, MOST_SLEEP_CYCLES)

    def prepare_us(self, calls, times=5):
        """Of each call the microseconds of what it launches before its longest launch: what prepares a mask. Medians of the
        launches by torch's profiler, L2 emptied before each call."""
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
            for _ in range(times):
                for call in calls:
                    self.flush.fill_(1)  # a kernel of torch's, between the calls
                    call()
            torch.cuda.synchronize()
        on_gpu = [event for event in profile.events() if event.device_type == torch.autograd.DeviceType.CUDA]
        on_gpu.sort(key=lambda event: event.time_range.start)
        found = launches_between([(event.name, event.time_range.elapsed_us()) for event in on_gpu], "FillFunctor")
        return [before_the_longest(found[n :: len(calls)]) for n in range(len(calls))]


def launches_between(launches, mark):
    """[(name, us)] -> for each launch whose name has the mark, the us of those behind it."""
    found = []
    for name, us in launches:
        if mark in name:
            found.append([])
        elif found:
            found[-1].append(us)
    return found


def before_the_longest(calls):
    """calls: of each the us of its launches. The median of each launch; the sum of those before the longest. None: the
    profiler saw no launch."""
    medians = [statistics.median(same) for same in zip(*calls, strict=False)]
    if not medians:
        return None
    return round(sum(medians[: medians.index(max(medians))]), 1)


def schedule(counts):
    """Whose turn it is, i counts[i] times and spread evenly: [3, 1] -> [0, 0, 1, 0]."""
    turns = [((turn + 0.5) / number, i) for i, number in enumerate(counts) for turn in range(number)]
    return [i for _, i in sorted(turns)]


def count(seconds, each):
    """How many samples fit: at least 5, or 3 of a call that takes long; at most 200."""
    return max(3 if each > LONG_SECONDS else 5, min(200, int(seconds / max(each, 1e-6))))


def captured(call, side):
    """On the stream that is the current one already."""
    for _ in range(2):
        call()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=side):
        call()

    def replay(keep=call):  # the graph reads what the call holds, which the next capture would free
        graph.replay()

    return replay


def summary(samples):
    """Median, 10th and 90th percentile in milliseconds."""
    deciles = statistics.quantiles(samples, n=10, method="inclusive") if len(samples) > 1 else [samples[0]] * 9
    return {
        "ms": round(statistics.median(samples), 6),
        "p10": round(deciles[0], 6),
        "p90": round(deciles[-1], 6),
        "samples": len(samples),
    }


def ceilings(device):
    """What this machine can do at best, measured: {"tflops", "copy_gbs", "dtype"}."""
    timer = Timer(device)
    size, dtype, elements = (8192, torch.bfloat16, 1 << 29) if device == "cuda" else (1024, torch.float32, 1 << 25)
    a, b = (torch.randn(size, size, device=device, dtype=dtype) for _ in range(2))
    product = timer(lambda: torch.mm(a, b))
    source = torch.empty(elements, dtype=torch.int16, device=device).random_()
    target = torch.empty_like(source)
    copy = timer(lambda: target.copy_(source))
    return {
        "tflops": round(2 * size**3 / product["ms"] / 1e9, 3),
        "copy_gbs": round(4 * elements / copy["ms"] / 1e6, 1),
        "dtype": str(dtype).removeprefix("torch."),
    }
