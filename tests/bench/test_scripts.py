"""The scripts as a user starts them, on tiny cases."""

import importlib
import json
import subprocess
import sys
from pathlib import Path

import package
import pytest

torch = pytest.importorskip("torch")
memory = pytest.importorskip("benchmark_memory")
import benchmark_decode  # noqa: E402
import command  # noqa: E402
import record  # noqa: E402
import timing  # noqa: E402

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
    words = ["--models", "gpt2", "--layers", "1", "--dtype", "bfloat16", "--autocast", "--attention", "ours", "sdpa_flash"]
    words += ["--seq", "16", "--pass", "training", "--seconds", "0.01", "--device", "cpu", "--output", str(path), "--force"]
    monkeypatch.setattr(sys, "argv", ["benchmark_models.py", *words])
    assert not models.main()
    rows = json.loads(path.read_text())["rows"]
    assert [row["baseline"] for row in rows] == ["ours", "sdpa", "sdpa_flash"] and all(
        "reason" not in row for row in rows
    ), rows
    assert all(row["case"]["layers"] == 1 and row["case"]["autocast"] for row in rows)


@pytest.fixture
def run_here(monkeypatch, capsys):
    """Runs a script in this process, as `run` does in its own: exit code and what it wrote."""

    def run(script, *arguments):
        monkeypatch.setattr(sys, "argv", [script, *map(str, arguments)])
        with pytest.raises(SystemExit) as end:
            command.exit_on_bad_input(importlib.import_module(script.removesuffix(".py")).main)
        return subprocess.CompletedProcess(sys.argv, end.value.code or 0, *capsys.readouterr())

    return run


def test_derivatives(run_here):
    if package.unavailable:
        pytest.skip(package.unavailable)
    done = run_here(
        "benchmark_derivatives.py", "--seq", "8", "--heads", "1", "--head-dim", "8", "--rounds", "1", "--causal"
    )
    assert done.returncode == 0, done.stderr
    assert "x forward" in done.stdout and "x backward" in done.stdout


def test_overhead(run_here, monkeypatch):
    if package.unavailable:
        pytest.skip(package.unavailable)
    overhead = importlib.import_module("benchmark_overhead")
    monkeypatch.setattr(overhead, "CALLS", 2)
    monkeypatch.setattr(overhead, "BATCHES", 2)
    done = run_here("benchmark_overhead.py", "--device", "cpu", "--seq", "8", "--heads", "1", "--head-dim", "16")
    assert done.returncode == 0, done.stderr
    for name in ("attention()", "flash_attn_func()", "attention() and its backward", "attention_over_cache(), one query"):
        assert name in done.stdout
    assert all(float(line[60:].split()[0]) > 0 for line in done.stdout.splitlines())
    monkeypatch.setattr(overhead.peer, "compiled", lambda: overhead.torch_flex.flex_attention)  # to compile takes a minute
    done = run_here("benchmark_overhead.py", "--device", "cpu", "--programs", "--seq", "64", "--heads", "1")
    assert done.returncode == 0, done.stderr
    for name in ("documents: flex_attention()", "neighbours: torch's, compiled", "relative bias: flex_attention() and its"):
        assert name in done.stdout


@pytest.mark.long_tail  # two processes that import all that the benchmarks do: 16 s
def test_overhead_beside_another_package(run):
    if package.unavailable:
        pytest.skip(package.unavailable)
    folder = Path(package.flash_attention.__file__).parents[1]
    tiny = ["--device", "cpu", "--seq", "8", "--heads", "1", "--head-dim", "16", "--batches", "1"]
    done = run("benchmark_overhead.py", *tiny, "--other", folder)
    assert done.returncode == 0, done.stderr
    assert all(float(line.split()[-1]) > 0 for line in done.stdout.splitlines())


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


@pytest.mark.parametrize("answer", [0, 1, 2, 3, 7, 8, 100, 128])
def test_bisection_finds_the_last_that_fits(answer):
    tried = []
    assert memory.bisect(lambda n: tried.append(n) or n <= answer, 128) == answer
    assert max(tried, default=0) <= 128
    if answer < 128:
        assert answer + 1 in tried  # the next larger one was run and did not fit
