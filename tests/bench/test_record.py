"""bench/record.py: its stages are commands that exist, and each is a process that may be stopped or may lose the GPU."""

import importlib
import json
import os
import signal
import sys

import pytest

torch = pytest.importorskip("torch")
import record  # noqa: E402
import timing  # noqa: E402

TINY = ["--seq", "32", "64", "--heads", "2", "--head-dim", "16", "--device", "cpu", "--quiet"]


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
