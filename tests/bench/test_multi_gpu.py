"""bench/multi_gpu.py as a user starts it: two processes over gloo, and the blocks of four ranks in one process."""

import json
import subprocess
import sys
from pathlib import Path

import package
import pytest

torch = pytest.importorskip("torch")
if package.unavailable:
    pytest.skip(package.unavailable, allow_module_level=True)
from report.results import load  # noqa: E402

BENCH = Path(__file__).resolve().parents[2] / "bench"
TINY = ["--device", "cpu", "--seq", "64", "--heads", "4", "--heads-kv", "2", "--head-dim", "16", "--mask", "causal"]


def run(*words):
    return subprocess.run([sys.executable, *map(str, words)], capture_output=True, text=True, timeout=300)


@pytest.mark.long_tail  # three processes that import torch; tests/python/parallel has the library's part
def test_two_processes(tmp_path):
    path = tmp_path / "multi.json"
    start = ["-m", "torch.distributed.run", "--nproc-per-node", "2", "--standalone"]
    done = run(*start, BENCH / "multi_gpu.py", *TINY, "--seconds", "0.01", "--pass", "both", "--output", path)
    assert done.returncode == 0, done.stderr
    results = load(path)
    assert results.head["world"] == 2
    rows = {row["baseline"]: row for row in results.rows}
    assert rows["torch_ring"]["reason"] == "runs on cuda only"
    flops = 3.5 * 4 * 4 * 64 * 64 * 16 / 2
    for name in ("ours_ring", "ours_all_gather", "ours_ulysses", "gather_sdpa", "data_parallel"):
        row = rows[name]
        share = 1 if name == "data_parallel" else 2
        assert row["tflops"] == pytest.approx(flops / share / row["ms"] / 1e9, abs=1e-4) and row["scaling"] >= 0
        assert name in done.stdout


def test_the_blocks_of_four_ranks(tmp_path, warm_python):
    path = tmp_path / "steps.json"
    done = warm_python(BENCH / "multi_gpu.py", *TINY, "--seconds", "0.01", "--steps", "4", "--output", path)
    assert done.returncode == 0, done.stderr
    rows = json.loads(path.read_text())["rows"]
    assert [(row["baseline"], row["pass"]) for row in rows] == [
        ("ours", "forward"),
        ("steps_4", "forward"),
        ("ours", "backward"),
        ("steps_4", "backward"),
    ]
    wrong = warm_python(BENCH / "multi_gpu.py", *TINY, "--baselines", "nobody", "--output", path)
    assert wrong.returncode == 2 and "baselines: got 'nobody'; allowed: data_parallel" in wrong.stderr


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_simulated_blocks_compute_attention(device):
    import cases
    from flash_attention import attention
    from flash_attention.parallel import join
    from peers import parallel_calls

    if device == "cuda" and not torch.cuda.is_available():
        pytest.skip("no NVIDIA GPU here")
    seq, dtype = (64, torch.float32) if device == "cpu" else (2048, torch.bfloat16)
    case = cases.Case(1, seq, 4, 64, heads_kv=2, causal=True)
    tensors = [torch.randn(1, seq, heads, 64, device=device, dtype=dtype, requires_grad=True) for heads in (4, 2, 2, 4)]
    error = {"atol": 1e-5, "rtol": 1e-4} if device == "cpu" else {"atol": 3e-2, "rtol": 3e-2}
    forward, backward = parallel_calls.simulated_steps(case, 4, [tensor.detach() for tensor in tensors])
    q, k, v, dout = tensors
    expected = attention(q, k, v, causal=True)
    torch.testing.assert_close(join([out for out, _ in forward()]), expected, **error)
    dq, _, _ = torch.autograd.grad(expected, (q, k, v), dout.detach())
    torch.testing.assert_close(join([found[0] for found in backward()]), dq, **error)
