"""What people meet in the first hour with the command."""

import argparse
import os
import re
import signal
import subprocess
import time
from importlib import import_module
from pathlib import Path

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


ROOT = Path(__file__).resolve().parents[2]
READ = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "SECURITY.md", *sorted((ROOT / "docs").rglob("*.md"))]


def typed_in(text: str) -> list[list[str]]:
    """The words of each call of the command: in backticks, or a line of code, without its comment."""
    text = re.sub(r"\\\n *", "", text)
    inline = re.findall(r"`(flash-attention [^`]+)`", text)
    lines = re.findall(r"^ *(?:[A-Z_]+=\S+ +)*(flash-attention .*)$", text, re.MULTILINE)
    calls = [re.split(r"\s{3,}|\s#|[;|&(]", call)[0].split()[1:] for call in (*inline, *lines)]
    return [words for words in calls if words and re.fullmatch(r"[a-z]+|--\w+", words[0])]


def mistakes_in(calls: list[list[str]], command) -> list[str]:
    """Those that name a verb, a flag or a set of problems that the command does not have."""
    verbs = set(re.findall(r"^  ([a-z]+) ", command("--help").stdout, re.MULTILINE)) | {"--help", "--version", "help"}
    helps = {verb: command(verb, "--help").stdout for verb in {words[0] for words in calls} & verbs if verb[0] != "-"}
    sets = re.findall(r"[\w-]+", command("bench", "no_set", code=2).stderr.partition("allowed: ")[2]) + ["micro"]
    wrong = []
    for verb, *rest in calls:
        flags = set(re.findall(r"--[a-z][\w-]*", helps.get(verb, ""))) | {"--help"}
        named = [word.partition("=")[0] for word in rest if word.startswith("--")]
        no_set = verb == "bench" and rest and rest[0][0] not in "-." and rest[0] not in sets
        if verb not in verbs or not set(named) <= flags or no_set:
            wrong.append(" ".join((verb, *rest)))
    return wrong


def test_what_the_documents_type_exists(command):
    calls = [words for page in READ if "lab" not in page.parts for words in typed_in(page.read_text())]
    assert len(calls) > 60 and mistakes_in(calls, command) == []


def test_what_does_not_exist_is_found(command):
    text = "`flash-attention bench memory`, `flash-attention rum`,\n\n    flash-attention run --seq_q 3 \\\n        --causal   why\n"
    assert mistakes_in(typed_in(text), command) == ["bench memory", "rum", "run --seq_q 3 --causal"]
