"""`flash-attention trace`: a file that Perfetto reads, a page that needs no network, refusals."""

import json
import re

import pytest

PROBLEM = ("--dtype", "bf16", "--seq-q", 128, "--heads", 1, "--head-dim", 64)


@pytest.fixture(scope="module")
def traced(command, tmp_path_factory):
    folder = tmp_path_factory.mktemp("trace")
    output, page = folder / "trace.json", folder / "trace.html"
    text = command("trace", *PROBLEM, "--kernel", "forward/sm90", "--output", output, "--page", page).stdout
    return text, json.loads(output.read_text()), page.read_text()


def test_what_is_printed(traced):
    text = traced[0]
    assert "forward/sm90" in text and "no time here was measured" in text and "the busiest" in text


def test_spans_are_whole(traced):
    """Each span has a named thread, a beginning and a length; spans of a warp do not overlap."""
    events = traced[1]["traceEvents"]
    named = {(event["pid"], event["tid"]) for event in events if event["ph"] == "M" and event["name"] == "thread_name"}
    rows = {}
    for event in events:
        if event["ph"] == "X":
            assert (event["pid"], event["tid"]) in named and event["dur"] >= 0 and event["ts"] >= 0
            rows.setdefault((event["pid"], event["tid"]), []).append((event["ts"], event["ts"] + event["dur"]))
    assert len(rows) >= 8
    for (_, thread), spans in rows.items():
        if thread < 10000:
            assert all(before[1] <= after[0] + 1e-6 for before, after in zip(sorted(spans), sorted(spans)[1:], strict=False))
    assert any(event["name"] == "wgmma" for event in events)


def test_the_page_needs_nothing(traced):
    page = traced[2]
    assert not re.search(r"(src|href)\s*=|https?://|@import|url\(", page)
    data = json.loads(re.search(r"^const data = (.*?);\nconst canvas", page, re.MULTILINE | re.DOTALL).group(1))
    assert data["clocks"] > 0 and len(data["rows"]) > 4
    assert {row["name"] for row in data["rows"]} >= {"tensor cores", "exponentials", "warp 0"}
    assert "an empty kernel" in page  # the rates, each with its source


def test_backward_and_decode(command):
    backward = command.json("trace", "backward", *PROBLEM)
    assert backward["kernel"] == "backward/sm90" and backward["launches"][0]["unit"].startswith("backward/sm90/")
    decode = command.json("trace", "decode", *PROBLEM, "--seq-kv", 512)
    assert decode["kernel"].startswith("decode/") and decode["predicted_s"] > 0


def test_refusals(command):
    assert "got 'sideways'; allowed are forward, backward and decode" in command("trace", "sideways", code=2).stderr
    assert "block: got 77" in command("trace", *PROBLEM, "--block", 77, code=2).stderr
    counter = ("--dtype", "bf16", "--seq-q", 4096, "--heads", 64, "--causal", "--sampled")
    assert "blocks of forward/sm90 need each other" in command("trace", *counter, code=2).stderr
    assert "got 75; allowed are those of sm_80" in command("trace", *PROBLEM, "--arch", "sm_75", code=2).stderr
