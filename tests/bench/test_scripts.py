"""The scripts as a user starts them, on tiny cases."""

import importlib
import json
import os
import signal
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path

import package
import pytest

torch = pytest.importorskip("torch")
memory = pytest.importorskip("benchmark_memory")
import benchmark_decode  # noqa: E402
import command  # noqa: E402
import record  # noqa: E402
import timing  # noqa: E402
from progress import Progress  # noqa: E402

BENCH = Path(__file__).resolve().parents[2] / "bench"
TINY = ["--seq", "32", "64", "--heads", "2", "--head-dim", "16", "--device", "cpu", "--quiet"]
FEW = ["--baselines", "sdpa_math", "megatron_local", "sdpa_cudnn"]


@pytest.fixture
def run(warm_python):
    return lambda script, *arguments: warm_python(BENCH / script, *arguments)


def test_speed(run, tmp_path):
    path = tmp_path / "speed.json"
    done = run("benchmark_speed.py", *TINY, *FEW, "--seconds", "0.01", "--mask", "causal", "--output", path)
    assert done.returncode == 0, done.stderr
    data = json.loads(path.read_text())
    assert len(data["rows"]) == 2 * 2 * 3
    assert {row["reason"] for row in data["rows"] if "reason" in row} == {"runs on cuda only"}
    for row in data["rows"]:
        if "reason" not in row:
            assert row["p10"] <= row["ms"] <= row["p90"] and row["samples"] >= 5
            assert 0 < row["interleaved_p10"] <= row["interleaved_ms"] <= row["interleaved_p90"] and row["matmul_ms"] > 0
            flops = 4 * 2 * row["case"]["seq"] ** 2 * 16 / 2 * (2.5 if row["pass"] == "backward" else 1)
            assert row["tflops"] == pytest.approx(flops / row["ms"] / 1e9, abs=1e-4)
    assert data["command"].startswith("bench/benchmark_speed.py --seq 32 64") and str(tmp_path) not in data["command"]
    assert data["machine"]["device"] and data["versions"]["torch"] and data["commit"] and data["ceilings"]["copy_gbs"] > 0
    again = run("benchmark_speed.py", *TINY, "--output", path)
    assert again.returncode == 2 and "exists; allowed: --resume" in again.stderr


def test_between_matrix_products_alone(monkeypatch, tmp_path):
    path = tmp_path / "interleaved.json"
    words = ["--baselines", "sdpa_math", "--interleaved", "--seconds", "0.01", "--part", "1/2", "--output", str(path)]
    monkeypatch.setattr(sys, "argv", ["benchmark_speed.py", *TINY, *words])
    monkeypatch.setattr(timing.Timer, "cpu_turns", None)  # which makes the pauses
    assert not record.benchmark_speed.main()
    rows = json.loads(path.read_text())["rows"]
    assert [(row["case"]["seq"], row["pass"]) for row in rows] == [(64, "forward"), (64, "backward")]
    assert all(row["ms"] == row["interleaved_ms"] and row["samples"] >= 5 and row["matmul_ms"] > 0 for row in rows)


def test_models(monkeypatch, tmp_path, capsys):
    """With narrow layers: the optimizer's step over the real ones takes seconds."""
    if package.unavailable:
        pytest.skip(package.unavailable)
    models = importlib.import_module("benchmark_models")
    for name, shape in models.models.MODELS.items():
        monkeypatch.setitem(models.models.MODELS, name, {**shape, "layers": 2, "width": 64, "heads": 4, "hidden": 96})
    monkeypatch.setitem(models.models.MODELS["gpt2"], "heads_kv", 4)
    monkeypatch.setitem(models.models.MODELS["llama"], "heads_kv", 2)
    path = tmp_path / "models.json"
    words = ["--seq", "16", "--seconds", "0.01", "--device", "cpu", "--quiet", "--output", str(path)]
    monkeypatch.setattr(sys, "argv", ["benchmark_models.py", *words])
    assert not models.main()
    rows = json.loads(path.read_text())["rows"]
    assert {(r["case"]["model"], r["pass"], r["baseline"]) for r in rows} == {
        (m, p, b) for m in ("gpt2", "llama") for p in ("forward", "training") for b in ("ours", "sdpa")
    }
    assert all("reason" not in row and row["samples"] >= 3 for row in rows), rows
    assert capsys.readouterr().out.count("times as fast") == 4


@pytest.fixture
def run_here(monkeypatch, capsys):
    """Runs a script in this process, as `run` does in its own: exit code and what it wrote."""

    def run(script, *arguments):
        monkeypatch.setattr(sys, "argv", [script, *map(str, arguments)])
        with pytest.raises(SystemExit) as end:
            command.exit_on_bad_input(importlib.import_module(script.removesuffix(".py")).main)
        return subprocess.CompletedProcess(sys.argv, end.value.code or 0, *capsys.readouterr())

    return run


def test_overhead(run_here, monkeypatch):
    if package.unavailable:
        pytest.skip(package.unavailable)
    overhead = importlib.import_module("benchmark_overhead")
    monkeypatch.setattr(overhead, "CALLS", 2)
    monkeypatch.setattr(overhead, "BATCHES", 2)
    done = run_here("benchmark_overhead.py", "--device", "cpu", "--seq", "8", "--heads", "1", "--head-dim", "16")
    assert done.returncode == 0, done.stderr
    for name in ("attention()", "flash_attn_func()", "attention() and its backward", "backward of torch's"):
        assert name in done.stdout
    assert all(float(line[40:].split()[0]) > 0 for line in done.stdout.splitlines())


def test_decode(run, run_here, tmp_path):
    if package.unavailable:
        pytest.skip(package.unavailable)
    path = tmp_path / "decode.json"
    tiny = [
        "--device",
        "cpu",
        "--shapes",
        "2x4/2x70",
        "--head-dim",
        "16",
        "--pages",
        "16",
        "--seconds",
        "0.01",
        "--json",
        path,
    ]
    done = run("benchmark_decode.py", *tiny)
    assert done.returncode == 0, done.stderr
    (row,) = json.loads(path.read_text())["rows"]
    assert row["shape"] == [2, 4, 2, 70, 16, 1] and set(row["times"]) == {"ours", "invariant", "page 16", "torch"}
    assert all(entry["p10"] <= entry["ms"] <= entry["p90"] for entry in row["times"].values())
    assert row["over_others"] == pytest.approx(row["times"]["ours"]["ms"] / row["times"]["torch"]["ms"], abs=1e-4)
    wrong = run_here("benchmark_decode.py", "--device", "cpu", "--shapes", "2x4x70")
    assert wrong.returncode == 2 and "expected BATCHxHEADS/KV_HEADSxKEYS" in wrong.stderr


def test_the_list_of_decoding_has_forty_shapes():
    """Batches, heads, widths, lengths and queries of the aim: no shape slower than another library."""
    kinds = benchmark_decode.FORTY
    shapes = [(*kind, *benchmark_decode.parsed(text)) for kind, texts in kinds.items() for text in texts]
    assert len(shapes) == len(set(shapes)) == 40
    dims, queries, batches, heads, heads_kv, keys = zip(*shapes, strict=True)
    assert set(dims) == {64, 128, 256} and set(queries) == {1, 4}
    assert {1, 256} <= set(batches) and min(keys) == 128 and max(keys) == 131072
    assert set(zip(heads, heads_kv, strict=True)) == {(32, 8), (8, 1), (32, 32), (64, 4)}


def test_prefill_in_pages_is_measured(run, run_here, tmp_path):
    path = tmp_path / "prefill.json"
    tiny = ["--device", "cpu", "--shapes", "1x4/2x20x70", "--head-dim", "16", "--pages", "16", "--dtype", "float32"]
    done = run("benchmark_prefill.py", *tiny, "--kernels", "cpu/prefill", "--seconds", "0.01", "--json", path)
    assert done.returncode == 0, done.stderr
    (row,) = json.loads(path.read_text())["rows"]
    assert row["shape"] == [1, 4, 2, 20, 70, 16] and set(row["times"]) == {"one piece", "page 16", "cpu/prefill"}
    wrong = run_here("benchmark_prefill.py", "--device", "cpu", "--shapes", "1x4/2x70")
    assert wrong.returncode == 2 and "expected BATCHxHEADS/KV_HEADSxQUERIESxKEYS" in wrong.stderr


def test_memory_grows_with_the_scores(run, tmp_path):
    path = tmp_path / "memory.json"
    sizes = ["--seq", "256", "1024", "--heads", "8", "--head-dim", "16", "--device", "cpu", "--quiet"]
    done = run("benchmark_memory.py", *sizes, "--baselines", "megatron_local", "--output", path)
    assert done.returncode == 0, done.stderr
    short, long = (row["extra_bytes"] for row in json.loads(path.read_text())["rows"])
    scores = 8 * 1024 * 1024 * 4
    assert long > scores and long > 4 * short


def test_accuracy(run, tmp_path):
    path = tmp_path / "accuracy.json"
    done = run(
        "benchmark_accuracy.py", *TINY, "--baselines", "sdpa_math", "--dtype", "float32", "bfloat16", "--output", path
    )
    assert done.returncode == 0, done.stderr
    rows = json.loads(path.read_text())["rows"]
    assert len(rows) == 4
    for row in rows:
        low, high = (1e-9, 1e-5) if row["case"]["dtype"] == "float32" else (1e-4, 1e-2)
        for name in ("out", "dq", "dk", "dv"):
            assert low < row[name]["rms"] < high


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["--preset", "papers"], "preset: got 'papers'; allowed: paper, gpt3"),
        (["--baselines", "fa9"], "baseline: got 'fa9'; allowed: sdpa_math"),
        (["--preset", "quick", "--seq", "12"], "preset: got 'quick' together with --seq"),
        (["--seq", "0"], "seq: got 0; allowed: 1 or more"),
        (["--device", "cpu", "--graph"], "graph: got a CPU run; allowed: --device cuda"),
    ],
)
def test_bad_input_is_one_line(run_here, tmp_path, arguments, message):
    done = run_here("benchmark_speed.py", *arguments, "--output", tmp_path / "x.json")
    assert done.returncode == 2
    assert message in done.stderr and done.stderr.count("\n") == 1
    assert not (tmp_path / "x.json").exists()


@pytest.mark.parametrize("script", ["benchmark_speed.py", "benchmark_overhead.py"])
def test_a_gpu_that_is_not_here_is_refused_by_its_flag(run_here, script, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    done = run_here(script, "--device", "cuda")
    assert done.returncode == 2
    assert "argument --device: got cuda, but torch sees no NVIDIA GPU here; allowed: cpu" in done.stderr


def test_list_names_presets_and_baselines(run_here):
    done = run_here("benchmark_speed.py", "--list", "--device", "cpu")
    assert done.returncode == 0
    for name in ("paper", "quick", "sdpa_flash", "megatron_fused", "ours"):
        assert f"  {name} " in done.stdout
    assert "not here: runs on cuda only" in done.stdout


@pytest.mark.parametrize("stage", [name for name, words in record.STAGES.items() if words[0] in record.SCRIPTS])
def test_every_stage_of_the_record_is_a_command_that_exists(stage, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", [*record.STAGES[stage], "--list"])
    assert not importlib.import_module(sys.argv[0].removesuffix(".py")).main()
    named = sys.argv[sys.argv.index("--baselines") + 1 : -1]
    assert set(named) <= {line.split()[0] for line in capsys.readouterr().out.splitlines()} | {"ladder"}


@pytest.mark.parametrize("stage", [name for name, words in record.STAGES.items() if words[0] in record.OTHERS])
def test_every_list_of_the_record_is_a_command_that_exists(stage, monkeypatch, tmp_path):
    script, *words = record.STAGES[stage]
    lengths = ["--lengths", "64"] if stage.startswith(("masks", "programs")) else []
    path = tmp_path / "none.json"
    monkeypatch.setattr(sys, "argv", [script, *words, *lengths, "--first", "0", "--device", "cpu", "--json", str(path)])
    assert record.OTHERS[script].main() == 0 and not path.exists()


def test_what_is_compiled_ahead_is_every_case_once(monkeypatch, tmp_path):
    speed, seen = record.benchmark_speed, []
    monkeypatch.setattr(speed.command, "measure_all", lambda results, path, work, quiet: seen.append([w[0] for w in work]))
    for words in record.compiling(["options", "wide"]):
        assert words[0] == "benchmark_speed.py" and "sdpa_cudnn" not in words
        monkeypatch.setattr(sys, "argv", [*words, "--device", "cpu", "--output", str(tmp_path / "x.json"), "--force"])
        speed.main()
    rows = [json.dumps(row) for part in seen for row in part]
    options, wide = speed.presets.options(), speed.presets.wide()
    assert len(rows) == len(set(rows)) == 2 * (len(options) + 2 * len(wide))
    lists = record.compiling(["programs", "mla", "capacity", "ladder"])
    assert {words[0] for words in lists} == {"benchmark_programs.py", "benchmark_mla.py"}


def test_parts_of_the_kernels_are_taken_once(monkeypatch, tmp_path):
    """By workers that are processes of their own; one part fails, which stops nobody."""
    monkeypatch.setattr(record, "compiling", lambda stages: [["benchmark_mla.py", str(i)] for i in range(7)])

    def part():
        index = sys.argv[1]
        (tmp_path / f"{index}.{os.getpid()}").touch()
        if index == "3":
            raise RuntimeError("a part that fails")

    monkeypatch.setattr(record.benchmark_mla, "main", part)
    assert record.warm([], 60.0)
    assert sorted(path.name.split(".")[0] for path in tmp_path.iterdir()) == [str(i) for i in range(7)]


@pytest.mark.parametrize("stage", record.STAGES)
@pytest.mark.parametrize("short", [False, True], ids=["whole", "dry"])
def test_words_of_a_stage(stage, short, tmp_path):
    words = record.command_of(stage, tmp_path / "x.json", short, force=False)
    own = "--save" if stage == "ladder" else "--json" if record.STAGES[stage][0] in record.OTHERS else None
    assert words[-2:] == [own, str(tmp_path / "x.json")] if own else words[-1] == "--resume"
    added = record.SHORT.get(stage, record.SHORT[record.STAGES[stage][0]])
    assert (words[-len(added) - 2 : -2] == added or words[-len(added) - 3 : -3] == added) == short


@pytest.fixture
def known_ceilings(monkeypatch):
    """For scripts that are told nothing by them: to measure takes a second."""
    monkeypatch.setattr(timing, "ceilings", lambda device: {"tflops": 1.0, "copy_gbs": 1.0, "dtype": "float32"})


@pytest.mark.usefixtures("known_ceilings")
def test_a_stage_is_a_process_that_can_be_stopped(tmp_path, monkeypatch):
    torch.randn(600, 600) @ torch.randn(600, 600)  # starts threads, which a fork does not have
    words = ["benchmark_speed.py", *TINY, "--baselines", "sdpa_math", "--seconds", "0.01"]
    monkeypatch.setitem(record.STAGES, "gqa", words)
    assert record.run_stage("gqa", tmp_path, 100.0, short=False, force=False) == "done"
    kept = (tmp_path / "gqa.json").read_text()
    monkeypatch.setenv("FLASH_ATTENTION_COMMIT", "another")
    assert "is of commit" in record.run_stage("gqa", tmp_path, 100.0, short=False, force=False)
    assert (tmp_path / "gqa.json").read_text() == kept
    monkeypatch.setitem(record.STAGES, "gqa", [*words, "--rest", "100"])
    assert record.run_stage("gqa", tmp_path, 3.0, short=False, force=True) == "NOT COMPLETE"
    json.loads((tmp_path / "gqa.json").read_text())  # the old file or the new one, whole


@pytest.mark.usefixtures("known_ceilings")
@pytest.mark.parametrize("end", ["error", "signal"])
def test_a_stage_goes_on_after_the_gpu_was_lost(end, tmp_path, monkeypatch):
    """A call that leaves the context unusable, or kills the process, is a row with its reason; another process measures
    the rest."""
    speed = record.benchmark_speed

    def run_words(words):
        failed, call_of = [], speed.call_of

        def broken(case, entry, which, tensors):
            if entry.name != "megatron_local" or which != "backward":
                return call_of(case, entry, which, tensors)
            if end == "signal":
                os.kill(os.getpid(), signal.SIGKILL)
            failed.append(entry.name)
            raise RuntimeError("an illegal memory access was encountered")

        monkeypatch.setattr(speed.command, "is_lost", lambda: failed)
        monkeypatch.setattr(speed, "call_of", broken)
        sys.argv = words
        speed.command.exit_on_bad_input(speed.main)

    monkeypatch.setattr(record, "run_words", run_words)
    words = ["benchmark_speed.py", *TINY, "--baselines", "megatron_local", "sdpa_math", "--seconds", "0.001"]
    monkeypatch.setitem(record.STAGES, "gqa", words)
    assert record.run_stage("gqa", tmp_path, 100.0, short=False, force=True) == "done, the GPU lost 2 times"
    rows = json.loads((tmp_path / "gqa.json").read_text())["rows"]
    assert len(rows) == 2 * 2 * 2 and sorted(path.name for path in tmp_path.iterdir()) == ["gqa.json"]
    left_out = {(row["case"]["seq"], row["baseline"], row["pass"]): row["reason"] for row in rows if "reason" in row}
    assert set(left_out) == {(seq, "megatron_local", "backward") for seq in (32, 64)}
    assert all(("illegal memory" if end == "error" else "died with signal 9") in reason for reason in left_out.values())


def test_a_file_of_the_command_is_signed(tmp_path, head, monkeypatch):
    record.benchmark_speed.command.Results("speed", {**head, "commit": ""}).save(tmp_path / "ladder.json")
    monkeypatch.setenv("FLASH_ATTENTION_COMMIT", "0123456789abcdef")
    record.sign(tmp_path / "ladder.json")
    assert json.loads((tmp_path / "ladder.json").read_text())["commit"] == "0123456789ab"
    assert not record.foreign(tmp_path / "ladder.json")


@pytest.mark.parametrize("counts", [[1], [3, 1], [5, 5, 5], [20, 3, 7]])
def test_turns_are_spread_evenly(counts):
    turns = timing.schedule(counts)
    assert [turns.count(i) for i in range(len(counts))] == counts
    for i, number in enumerate(counts):
        half = turns[: len(turns) // 2].count(i)
        assert abs(half - number / 2) <= 1


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


@pytest.mark.parametrize("answer", [0, 1, 2, 3, 7, 8, 100, 128])
def test_bisection_finds_the_last_that_fits(answer):
    tried = []
    assert memory.bisect(lambda n: tried.append(n) or n <= answer, 128) == answer
    assert max(tried, default=0) <= 128
    if answer < 128:
        assert answer + 1 in tried  # the next larger one was run and did not fit


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
