"""bench/timing.py and bench/progress.py: whose turn it is, what is kept of the samples, the time left."""

import importlib
from contextlib import nullcontext

import pytest

pytest.importorskip("torch")
import timing
from progress import Progress


@pytest.mark.parametrize("counts", [[1], [3, 1], [5, 5, 5], [20, 3, 7]])
def test_turns_are_spread_evenly(counts):
    turns = timing.schedule(counts)
    assert [turns.count(i) for i in range(len(counts))] == counts
    for i, number in enumerate(counts):
        half = turns[: len(turns) // 2].count(i)
        assert abs(half - number / 2) <= 1


def test_what_prepares_a_mask_is_what_comes_before_the_longest_launch():
    launches = [("other", 1.0), ("Fill<int>", 50.0), ("kernel", 9.0), ("kernel", 100.0), ("kernel", 4.0)]
    launches += [("Fill<int>", 60.0), ("kernel", 11.0), ("kernel", 90.0), ("kernel", 5.0)]
    calls = timing.launches_between(launches, "Fill")
    assert calls == [[9.0, 100.0, 4.0], [11.0, 90.0, 5.0]]
    assert timing.before_the_longest(calls) == 10.0
    assert timing.before_the_longest([[7.0], [8.0]]) == 0  # nothing is prepared


class CountingTimer:
    """Instead of a GPU: which calls were timed together."""

    device, stream = "cuda", nullcontext

    def __init__(self):
        self.together = []

    def warmed(self, call):
        return call(), 0.0

    def in_turn(self, calls):
        self.together.append([name for name, _ in calls])
        return [{"ms": 1.0, "p10": 1.0, "p90": 1.0, "samples": 5} for _ in calls]


@pytest.mark.parametrize("alone", [False, True])
def test_who_takes_turns_with_whom(alone, monkeypatch):
    speed = importlib.import_module("benchmark_speed")
    monkeypatch.setattr(speed, "call_of", lambda case, entry, which, tensors: lambda: entry.run(entry.name))
    monkeypatch.setattr(speed.baselines, "inputs", lambda *arguments: None)

    def entry(name, run=lambda name: name, **more):
        return speed.baselines.Baseline(name, "", run, lambda case, device: "", **more)

    def broken(name):
        raise RuntimeError("no such kernel")

    entries = [entry("a"), entry("scores", stores_scores=True), entry("bad", broken), entry("b"), entry("c")]
    timer = CountingTimer()
    turns = speed.InTurn(speed.cases.Case(1, 64, 1, 64), entries, "forward", timer, alone=alone)
    rows = {each.name: turns.row(each) for each in entries}
    assert rows["bad"] == {"reason": "RuntimeError: no such kernel"}
    assert all(row["ms"] == 1.0 for name, row in rows.items() if name != "bad")
    assert [group for group in timer.together if group] == (
        [["a"], ["scores"], ["b"], ["c"]] if alone else [["a", "b", "c"], ["scores"]]
    )


class SlowHost:
    """A GPU with a queue, and a host that takes its time to fill it: the clock of both is the host's."""

    def __init__(self, monkeypatch):
        self.now, self.free, self.cycles = 0.0, 0.0, []  # seconds; when the GPU has done what is queued
        gpu = self

        class Event:
            def __init__(self, **unused):
                self.time = None

            def record(self):
                self.time = gpu.free = max(gpu.free, gpu.now)

            def query(self):
                return self.time <= gpu.now

            def elapsed_time(self, other):
                return (other.time - self.time) * 1e3

        monkeypatch.setattr(timing.torch.cuda, "Event", Event)
        monkeypatch.setattr(timing.torch.cuda, "_sleep", self.sleep)
        monkeypatch.setattr(timing.torch.cuda, "synchronize", lambda: setattr(self, "now", max(self.now, self.free)))

    def sleep(self, cycles):
        self.cycles.append(cycles)
        self.run(0, cycles / 2e9)

    def run(self, host, gpu):
        self.now += host
        self.free = max(self.free, self.now) + gpu

    def zero_(self):
        self.run(5e-6, 5e-5)


def timer_of(gpu):
    timer = timing.Timer("cpu")
    timer.flush = gpu
    return timer


@pytest.mark.parametrize("host", [1e-5, 3e-4, 2e-3])
def test_launches_are_never_timed(host, monkeypatch):
    """Whatever the host takes for a call, a sample is what the GPU takes."""
    gpu = SlowHost(monkeypatch)
    calls = [(lambda: gpu.run(host, 1e-4), 1e-4), (lambda: gpu.run(1e-5, 2e-4), 2e-4)]
    slow, other = timer_of(gpu).in_turn(calls)
    assert slow["p10"] == slow["p90"] == pytest.approx(0.1)
    assert other["p10"] == other["p90"] == pytest.approx(0.2)
    assert slow["samples"] == other["samples"] == 200


def test_a_call_that_waits_for_the_gpu_is_timed_all_the_same(monkeypatch):
    gpu = SlowHost(monkeypatch)

    def call():
        gpu.run(1e-5, 1e-4)
        gpu.now = max(gpu.now, gpu.free)

    (found,) = timer_of(gpu).in_turn([(call, 0.05)])
    assert found["samples"] == 5 and max(gpu.cycles) == timing.MOST_SLEEP_CYCLES


def test_summary_is_median_and_deciles():
    found = timing.summary([float(i) for i in range(101)])
    assert (found["ms"], found["p10"], found["p90"], found["samples"]) == (50.0, 10.0, 90.0, 101)


class Screen:
    """A stream that is no terminal."""

    def __init__(self):
        self.text = ""

    def isatty(self):
        return False

    def write(self, text):
        self.text += text

    def flush(self):
        pass


def test_progress_tells_the_time_left():
    now = iter(range(0, 1000, 10))
    screen = Screen()
    with Progress(4, stream=screen, clock=lambda: next(now)) as progress:
        progress.step("a")
        progress.step("b")
    assert "[1/4] " in screen.text and "[2/4] " in screen.text
    assert progress.done == 2
    quiet = Screen()
    with Progress(1, quiet=True, stream=quiet) as progress:
        progress.step("a")
    assert quiet.text == ""


def test_eta():
    times = iter([0.0, 30.0])
    progress = Progress(4, quiet=True, stream=Screen(), clock=lambda: next(times))
    progress.done = 1
    assert progress.eta() == "1:30"
