"""What the command says to people: help that teaches, errors that name the flag, exit codes that mean something."""

import os
import subprocess

import pytest

VERBS = [
    "run",
    "bench",
    "plan",
    "doctor",
    "compile",
    "cache",
    "primer",
    "ladder",
    "profile",
    "report",
    "stress",
    "generate",
]


def test_overview_lists_every_verb(command):
    text = command("--help").stdout
    for verb in VERBS:
        assert f"  {verb} " in text


def test_without_a_verb_it_shows_the_overview_and_fails(command):
    assert "Verbs:" in command(code=2).stderr


SELF_TESTS = pytest.param(["doctor"], marks=pytest.mark.long_tail)  # seconds of them, for the line that the others write


@pytest.mark.parametrize("words", [["--version"], ["--help"], ["plan", "--json"], ["cache", "--help"], SELF_TESTS])
def test_output_that_is_lost_is_a_failure(command, words):
    with open("/dev/full", "w") as full:
        done = subprocess.run([command.path, *words], stdout=full, stderr=subprocess.PIPE, text=True, timeout=60)
    assert done.returncode == 8
    assert "could not be written" in done.stderr


def test_a_gpu_that_is_not_here_is_said_in_a_sentence(command, tmp_path):
    settings = {**os.environ, "FLASH_ATTENTION_DRIVER": str(tmp_path / "absent.so")}
    for words in (["bench"], ["bench", "micro"], ["run"], ["ladder"]):
        error = command(*words, "--device", "cuda", code=3, env=settings).stderr
        assert error.startswith("flash-attention: there is no NVIDIA driver here, so no GPU can be used")
        assert len(error.splitlines()) == 1


def test_the_emulator_works_without_a_folder_for_temporary_files(command, tmp_path):
    small = ["--device", "emulator", "--heads", "1", "--seq-q", "9", "--seq-kv", "9", "--head-dim", "8", "--dtype", "fp16"]
    for tmpdir in (tmp_path / "absent", command.path):
        settings = {**os.environ, "TMPDIR": str(tmpdir), "FLASH_ATTENTION_CACHE_DIR": str(tmp_path / "cache")}
        assert "kernel" in command("run", *small, env=settings).stdout


@pytest.mark.parametrize("verb", VERBS)
def test_help_of_a_verb(command, verb):
    text = command(verb, "--help").stdout
    assert command("help", verb).stdout == text
    assert "Flags:" in text and ("--json" in text or verb in ("report", "generate"))


def test_version_is_the_one_of_the_repository(command):
    version = (command.path.parents[2] / "VERSION").read_text().strip()
    assert command("--version").stdout.strip() == version


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["rum"], "unknown verb 'rum' (did you mean run?)"),
        (["run", "--cusal"], "unknown flag --cusal (did you mean --causal?)"),
        (["run", "--batch"], "--batch needs a value"),
        (["run", "--batch", "two"], "--batch: got 'two', allowed is a whole number"),
        (["run", "--batch", "-1"], "--batch: got '-1', allowed is a whole number from 0"),
        (["run", "--batch", "1", "--batch", "2"], "--batch is given twice"),
        (["run", "--causal=yes"], "--causal is a switch"),
        (["run", "again"], "unexpected word 'again'"),
        (["run", "--dtype", "int8"], "--dtype: got 'int8', allowed: float32, float16, bfloat16"),
        (["run", "--softcap", "nan"], "--softcap: got 'nan', allowed is a finite number"),
        (["run", "--window", "3"], "--window: got '3', allowed: two whole numbers"),
        (["run", "--device", "tpu"], "tpu"),
        (["run", "--device", "cpu", "--arch", "sm_80"], "--arch: the device is cpu"),
        (["run", "--device", "emulator", "--arch", "fast"], "--arch: got 'fast'"),
        (["run", "--kernel", "forward/none", "--device", "cpu"], "forward/none"),
        (["run", "--heads", "6", "--kv-heads", "4"], "heads_q: got 6; allowed are multiples of heads_kv, 4"),
        (["bench", "--seconds", "-1"], "--seconds: got '-1', allowed is a finite number of at least 0"),
        (["bench", "everything"], "bench: got 'everything', allowed: lengths"),
        (["bench", "--device", "emulator"], "--device: got emulator"),
        (["cache", "shrink"], "cache: got 'shrink', allowed: list, size, verify, clear, path"),
    ],
)
def test_a_mistake_is_named(command, words, expected):
    done = command(*words, code=2)
    assert expected in done.stderr
    assert done.stdout == ""


@pytest.mark.parametrize(
    ("words", "name"),
    [
        (["--head-dim", "577"], "head_dim"),
        (["--head-dim-v", "600"], "head_dim_v"),
        (["--heads", "6", "--kv-heads", "4"], "heads"),
        (["--dropout", "1"], "dropout"),
        (["--dropout", "-0.5"], "dropout"),
        (["--softcap", "-2"], "softcap"),
    ],
)
def test_a_problem_that_breaks_the_contract_is_refused_by_name(command, words, name):
    assert name in command("run", "--device", "cpu", *words, code=2).stderr


def test_a_gpu_that_is_not_here_is_exit_code_3(command, doctors_report):
    if any(finding["subject"].startswith("self-test cuda") for finding in doctors_report["findings"]):
        pytest.skip("this machine has a GPU")
    assert command("run", "--device", "cuda:0", code=3).stderr


def test_a_file_that_cannot_be_written_is_named(command):
    done = command("bench", "small", "--device", "cpu", "--save", "/no/such/folder/x.json", code=2)
    assert "--save: cannot write '/no/such/folder/x.json'" in done.stderr
