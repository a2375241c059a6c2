"""The search for what fits into a budget, without a GPU: which searches there are, and in which order."""

import benchmark_memory
import pytest
import torch


@pytest.fixture
def searched(monkeypatch, tmp_path):
    """Runs the script as on a GPU of 16 GB where nothing is measured; returns what it searched."""
    seen = []

    def largest(case, axis, entry, *_):
        seen.append((axis, case.seq, case.heads, entry.name))

    def measure_all(_results, _path, work, _quiet):
        for _, search in work:
            search()

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: type("Properties", (), {"total_memory": 16e9}))
    monkeypatch.setattr(benchmark_memory.machine, "facts", lambda _: {})
    monkeypatch.setattr(benchmark_memory, "largest", largest)
    monkeypatch.setattr(benchmark_memory.command, "measure_all", measure_all)

    def run(*words):
        output = ["--output", str(tmp_path / "capacity.json")]
        monkeypatch.setattr("sys.argv", ["benchmark_memory.py", "--budget", "16", *output, *words])
        benchmark_memory.main()
        return seen

    return run


def test_the_quickest_search_comes_first(searched):
    assert searched("--baselines", "ours", "sdpa_flash") == [
        (axis, seq, heads, name)
        for axis, seq, heads in (("batch", 1024, 8), ("batch", 4096, 16), ("seq", 1024, 16))
        for name in ("ours", "sdpa_flash")
    ]


def test_first_bounds_the_searches(searched):
    assert searched("--baselines", "ours", "sdpa_flash", "--first", "2") == [
        ("batch", 1024, 8, "ours"),
        ("batch", 1024, 8, "sdpa_flash"),
    ]
