"""What people meet in the first hour with the command."""

import argparse
import os
import re
import signal
import subprocess
import time
from importlib import import_module

import pytest


def examples(command, verb: str) -> list[list[str]]:
    """The lines of a verb's help that begin with the command's name, without what stands beside them."""
    lines = command(verb, "--help").stdout.splitlines()
    return [re.split(r"\s{3,}", line.strip())[0].split()[1:] for line in lines if line.startswith("  flash-attention ")]


def test_the_examples_for_the_emulator_count_something(command):
    emulated = [words for words in examples(command, "run") if "emulator" in words]
    assert emulated
    for words in emulated:
        counts = dict(re.findall(r"^(?:  of them )?(.*\S)  +(\d+)$", command(*words).stdout, re.MULTILINE))
        assert int(counts["mma FLOPs"]) > 0 and int(counts["global sectors of 32 bytes"]) > 0


def test_a_suggested_flag_can_be_typed(command):
    assert "(did you mean --seq-q?)" in command("run", "--seqq", 3, code=2).stderr
    assert "(did you mean run?)" in command("rum", code=2).stderr


@pytest.mark.parametrize("verb", ["bench", "compile"])
def test_python_has_the_flags_of_the_command(command, verb):
    theirs = set(re.findall(r"^  (--[\w-]+)", command(verb, "--help").stdout, re.MULTILINE))
    parser = argparse.ArgumentParser(add_help=False)
    import_module(f"flash_attention.commands.{verb}").add_arguments(parser)
    ours = {flag for action in parser._actions for flag in action.option_strings if flag.startswith("--")}
    if verb == "bench":
        theirs |= {"--backward"}  # the command has it as a set of problems
    assert ours <= theirs, ours - theirs
    assert parser.parse_args(["--dtype", "bf16", "--seq-q", "3"]).seq_q == 3


def test_a_missing_report_is_named(command):
    said = command("report", "nofile.json", code=2).stderr
    assert "there is no file nofile.json" in said and "pip" not in said


def test_no_room_says_how_much_was_wanted(command):
    said = command("run", "--device", "cpu", "--seq-q", 2_000_000_000, "--heads", 64, code=4).stderr
    assert re.search(r"no room for \d+\.\d+ [TP]iB of a tensor", said), said


def test_a_plan_for_a_gpu_does_not_claim_that_it_is_here(command):
    device = re.search(r"^device +(.*)$", command("plan", "--device", "cuda", "--arch", "sm_90").stdout, re.MULTILINE)[1]
    assert device == "a GPU like the H200, sm_90, 132 SMs; whether one is here does not matter"


@pytest.fixture
def slow_compiler(tmp_path):
    """g++ that takes its time when it compiles for the emulator."""
    script = tmp_path / "slow-g++"
    script.write_text('#!/bin/sh\nif [ "$1" != --version ]; then echo x >"$TMPDIR/began"; sleep 60; fi\nexec g++ "$@"\n')
    script.chmod(0o755)
    return script


def test_a_killed_emulated_run_leaves_nothing_for_long(command, tmp_path, slow_compiler):
    words = ["run", "--device", "emulator", "--arch", "sm_80", "--seq-q", "16", "--heads", "1", "--dtype", "fp16"]
    settings = {**os.environ, "TMPDIR": str(tmp_path), "FLASH_ATTENTION_CACHE_DIR": str(tmp_path / "cache")}
    run = subprocess.Popen(
        [command.path, *words], env={**settings, "FLASH_ATTENTION_CXX": str(slow_compiler)}, start_new_session=True
    )
    while not (tmp_path / "began").exists():
        assert run.poll() is None
        time.sleep(0.01)
    os.killpg(run.pid, signal.SIGKILL)
    run.wait()
    (folder,) = tmp_path.glob("flash_attention-*")
    assert list(folder.glob("emulator-*"))
    command(*words, env=settings)
    assert [path.name for path in folder.iterdir()] == ["lock"]
