"""`make run` draws with any Python: what it needs is in the repository."""

import json
import subprocess
import sys
import xml.dom.minidom
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def measured(kind: str, length: int, seconds: float, extra: int) -> dict:
    problem = {"seq_kv": length, "heads_q": 8, "head_dim": 64, "dtype": "float32", "causal": False}
    return {
        "pass": kind,
        "problem": problem,
        "time": {"median_s": seconds},
        "flops_per_second": 1e9 / seconds,
        "workspace_bytes": extra,
    }


def test_plots_need_no_package(tmp_path):
    results = [measured("standard_forward", 256, 0.002, 2**21), measured("standard_forward", 512, 0.008, 2**23)]
    results += [measured("forward", 256, 0.001, 0), measured("forward", 512, 0.002, 0), measured("forward", 1024, 0.004, 0)]
    report = tmp_path / "report.json"
    report.write_text(json.dumps({"device": {"name": "a machine"}, "results": results}))
    command = tmp_path / "command"  # in place of flash-attention
    command.write_text(f'#!/bin/sh\nwhile [ "$1" != --save ]; do shift; done; cp {report} "$2"\n')
    command.chmod(0o755)
    output = tmp_path / "run"
    done = subprocess.run(
        [sys.executable, "-I", "-S", ROOT / "tools" / "plot_run.py", "--command", command, "--output", output],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("measuring flash and standard attention")
    assert "At length 512 flash attention is 4.00x as fast" in done.stdout
    assert done.stdout.index(f"plot: {output}/time.svg") < done.stdout.index("What to try next:")
    assert f"  {command} run --seq-q 4096" in done.stdout
    for name in ("time", "speed", "memory"):
        drawing = xml.dom.minidom.parse(str(output / f"{name}.svg"))
        lines = drawing.getElementsByTagName("polyline")
        assert [len(line.getAttribute("points").split()) for line in lines] == [2, 3], name
        assert "a machine: 8 heads" in drawing.getElementsByTagName("title")[0].firstChild.data
