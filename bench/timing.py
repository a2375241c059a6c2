"""How long a call takes: warm-up, then samples whose median and spread are kept."""

import statistics
import time

import torch

FLUSH_BYTES = 256 << 20  # more than any L2 of today
SLEEP_CYCLES = 8_000_000  # the GPU waits this long while the CPU queues the samples, so launches are never timed
TURNS, PAUSE_SECONDS = 5, 0.01


class Timer:
    """Timer(device)(call) -> {"ms", "p10", "p90", "samples"}.

    On a GPU each sample is between two events, with L2 emptied before it; graph=True replays the call as a CUDA graph.
    """

    def __init__(self, device, seconds=0.15, warmup_seconds=0.05, graph=False):
        self.device, self.seconds, self.warmup_seconds, self.graph = device, seconds, warmup_seconds, graph
        self.flush = torch.empty(FLUSH_BYTES // 4, dtype=torch.int32, device="cuda") if device == "cuda" else None

    def __call__(self, call):
        samples = (
            self.cuda_samples(captured(call) if self.graph else call) if self.flush is not None else self.cpu_samples(call)
        )
        return summary(samples)

    def cpu_samples(self, call):
        started = time.perf_counter()
        call()
        first = time.perf_counter() - started
        while time.perf_counter() - started < self.warmup_seconds:
            call()
        samples = []
        for _ in range(count(self.seconds, first)):
            begin = time.perf_counter()
            call()
            samples.append((time.perf_counter() - begin) * 1e3)
        return samples

    def take_turns(self, calls):
        """On a CPU: one result for each of the calls, which take turns, so that the machine's other work hits all alike. A
        pause before each turn lets the threads of the one before fall asleep."""
        samples = [[] for _ in calls]
        for _ in range(TURNS):
            for call, mine in zip(calls, samples, strict=True):
                time.sleep(PAUSE_SECONDS)
                call()
                end = time.perf_counter() + self.seconds / TURNS
                while not mine or time.perf_counter() < end:
                    begin = time.perf_counter()
                    call()
                    mine.append((time.perf_counter() - begin) * 1e3)
        return [summary(mine) for mine in samples]

    def cuda_samples(self, call):
        call()
        torch.cuda.synchronize()
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        for _ in range(3):
            call()
        end.record()
        torch.cuda.synchronize()
        each = begin.elapsed_time(end) / 3e3
        for _ in range(min(200, int(self.warmup_seconds / max(each, 1e-6)))):
            call()
        samples, left = [], count(self.seconds, each)
        while left > 0:
            samples += self.queued(call, min(left, 20))
            left -= 20
        return samples

    def queued(self, call, number):
        events = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(number)]
        torch.cuda._sleep(SLEEP_CYCLES)
        for begin, end in events:
            self.flush.zero_()
            begin.record()
            call()
            end.record()
        torch.cuda.synchronize()
        return [begin.elapsed_time(end) for begin, end in events]


def count(seconds, each):
    """How many samples fit: at least 5, at most 200."""
    return max(5, min(200, int(seconds / max(each, 1e-6))))


def captured(call):
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            call()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    return graph.replay


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
