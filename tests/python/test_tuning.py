"""flash_attention.tune: what it measures, keeps and refuses. Each test in a process of its own: choices outlive calls."""

import json
import os
import subprocess
import sys

import pytest

PROBLEM = {"seq_q": 70, "seq_kv": 300, "heads_q": 2, "heads_kv": 2, "head_dim": 32}


@pytest.fixture
def run(tmp_path):
    def run(program, **settings):
        environment = {**os.environ, "FLASH_ATTENTION_CACHE_DIR": str(tmp_path / "cache"), **settings}
        environment.pop("FLASH_ATTENTION_TUNED", None)
        done = subprocess.run(
            [sys.executable, "-c", program], capture_output=True, text=True, env=environment, cwd=tmp_path
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    return run


def test_records_tunes_exports_and_imports(run, tmp_path):
    call = """
import numpy, flash_attention
q, k = numpy.ones((1, 70, 2, 32), "float32"), numpy.ones((1, 300, 2, 32), "float32")
for _ in range(3):
    flash_attention.attention(q, k, k, causal=True)
"""
    run(call, FLASH_ATTENTION_RECORD="calls.jsonl")
    calls = [json.loads(line) for line in (tmp_path / "calls.jsonl").read_text().splitlines()]
    assert [call["pass"] for call in calls] == ["forward"]
    assert calls[0]["problem"]["causal"] and calls[0]["problem"]["seq_kv"] == 300

    program = """
import json, flash_attention
seen = []
show = lambda *now: seen.append(now)
results = flash_attention.tune("calls.jsonl", device="cpu", budget=20, progress=show, export="t.json")
again = flash_attention.tune("calls.jsonl", device="cpu", budget=20, progress=False)
print(json.dumps([results, seen, again, flash_attention.import_tuned("t.json", device="cpu")]))
"""
    results, seen, again, imported = json.loads(run(program))
    assert results[0]["usual"].startswith("cpu/") and results[0]["seconds"] > 0 and results[0]["gain"] >= 1
    assert not results[0]["skipped"] and not results[0]["dropped"]
    assert seen[0][:2] == [0, 1] and "seq 70x300" in seen[0][2]
    assert again[0]["skipped"] == "tuned before"
    assert imported == 1

    damaged = (tmp_path / "t.json").read_text().replace("gain", "gani")
    (tmp_path / "damaged.json").write_text(damaged)
    program = """
import flash_attention
try:
    flash_attention.import_tuned("damaged.json", device="cpu")
except ValueError as error:
    print(error)
"""
    assert run(program) == "damaged.json: it is damaged: its hash is another\n"


def test_a_list_of_problems_and_its_refusals(run):
    program = f"""
import flash_attention
problem = {PROBLEM!r}
print(len(flash_attention.tune([{{"pass": "forward", "problem": problem}}], device="cpu", budget=10, progress=False)))
for wrong in ([], [{{"pass": "sideways", "problem": problem}}], [{{"pass": "forward", "problem": dict(problem, seq=3)}}]):
    try:
        flash_attention.tune(wrong, device="cpu")
    except ValueError as error:
        print(error)
"""
    assert run(program).splitlines() == [
        "1",
        "problems: there are no problems in it",
        "problems: pass: got 'sideways', allowed: forward, backward",
        "problems: problem.seq: a problem has no such field",
    ]


def test_control_c_keeps_what_was_measured(run):
    program = f"""
import os, signal, flash_attention
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell may start its jobs without
problems = [{{"pass": "forward", "problem": dict({PROBLEM!r}, seq_q=q)}} for q in (70, 71, 72)]
def progress(done, of, what, seconds):
    if done == 1:
        os.kill(os.getpid(), signal.SIGINT)
try:
    flash_attention.tune(problems, device="cpu", progress=progress)
except KeyboardInterrupt:
    print("interrupted")
print([result["skipped"] for result in flash_attention.tune(problems, device="cpu", progress=False)])
"""
    assert run(program).splitlines() == ["interrupted", "['tuned before', '', '']"]
