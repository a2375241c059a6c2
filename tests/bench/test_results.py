import json

import pytest

pytest.importorskip("torch")
command = pytest.importorskip("command")
from report.results import ResultError, Results, load  # noqa: E402

ROW = {
    "case": {"seq": 128},
    "baseline": "ours",
    "pass": "forward",
    "ms": 1.0,
    "p10": 1.0,
    "p90": 1.1,
    "samples": 9,
    "tflops": 2.0,
}
LEFT_OUT = {"case": {"seq": 128}, "baseline": "flex", "pass": "forward", "reason": "out of memory"}


@pytest.fixture
def saved(tmp_path, head):
    path = tmp_path / "speed.json"
    Results("speed", head, [ROW, LEFT_OUT]).save(path)
    return path


def test_what_is_saved_is_loaded(saved, head):
    found = load(saved)
    assert (found.kind, found.head, found.rows) == ("speed", head, [ROW, LEFT_OUT])
    assert found.measured() == [ROW]
    assert not list(saved.parent.glob("*.tmp"))
    Results("speed", head).save(saved)
    assert load(saved).rows == []


def test_a_file_cut_short_is_refused_by_name_and_line(saved):
    text = saved.read_text()
    cut = text[: text.index('"flex"') + 3]
    saved.write_text(cut)
    with pytest.raises(ResultError, match=rf"speed.json: line {cut.count(chr(10)) + 1}: not JSON"):
        load(saved)


def test_a_row_without_its_numbers_is_refused_by_line(saved):
    lines = saved.read_text().splitlines(keepends=True)
    index = next(i for i, line in enumerate(lines) if '"ours"' in line)
    lines[index] = lines[index].replace('"tflops"', '"teraflops"')
    saved.write_text("".join(lines))
    with pytest.raises(ResultError, match=rf"speed.json: line {index + 1}: a speed row without tflops"):
        load(saved)


@pytest.mark.parametrize(
    "text, message",
    [
        ("[]", "format: got 'list'"),
        ('{"format": "other"}', "format: got 'other'; allowed: 'flash_attention.results/1'"),
        (
            '{"format": "flash_attention.results/1", "kind": "x"}',
            "kind: got 'x'; allowed: speed, memory, capacity, accuracy, models",
        ),
        ('{"format": "flash_attention.results/1", "kind": "speed"}', "'machine' is missing"),
        ("", "line 1: not JSON"),
    ],
)
def test_other_files_are_refused(tmp_path, text, message):
    path = tmp_path / "x.json"
    path.write_text(text)
    with pytest.raises(ResultError, match="x.json: .*" + message):
        load(path)
    with pytest.raises(ResultError, match=r"y\.json: No such file"):
        load(tmp_path / "y.json")


def test_nothing_is_overwritten_without_force(saved, head):
    before = saved.read_bytes()
    with pytest.raises(ResultError, match=r"speed\.json: exists; allowed: --resume to add to it, --force to overwrite it"):
        command.opened(saved, "speed", head, resume=False, force=False)
    assert saved.read_bytes() == before
    assert command.opened(saved, "speed", head, resume=False, force=True).rows == []


def test_resume_refuses_another_machine_or_kind(saved, head):
    with pytest.raises(ResultError, match="commit was 0123456789ab; here it is ffff"):
        command.opened(saved, "speed", {**head, "commit": "ffff"}, resume=True, force=False)
    with pytest.raises(ResultError, match="holds speed results; allowed: memory"):
        command.opened(saved, "memory", head, resume=True, force=False)


def test_resume_measures_only_what_is_missing(saved, head):
    results = command.opened(saved, "speed", head, resume=True, force=False)
    calls = []
    identities = [{"case": {"seq": s}, "baseline": "ours", "pass": "forward"} for s in (128, 256)]
    work = [(identity, lambda i=identity: calls.append(i["case"]["seq"]) or dict(ROW, **i)) for identity in identities]
    command.measure_all(results, saved, work, quiet=True)
    assert calls == [256]
    assert [row["case"]["seq"] for row in load(saved).measured()] == [128, 256]


def test_a_failing_baseline_is_a_row_and_the_run_goes_on(tmp_path, head):
    path = tmp_path / "speed.json"

    def fails(error):
        def measure():
            raise error

        return measure

    failures = [RuntimeError("no kernel\nmore"), MemoryError(), RuntimeError("DefaultCPUAllocator: can't allocate memory")]
    work = [({"case": {"seq": i}, "baseline": "b", "pass": "forward"}, fails(e)) for i, e in enumerate(failures)]
    work.append(({"case": {"seq": 9}, "baseline": "b", "pass": "forward"}, lambda: ROW))
    command.measure_all(Results("speed", head), path, work, quiet=True)
    rows = json.loads(path.read_text())["rows"]
    assert [row.get("reason") for row in rows] == ["RuntimeError: no kernel", "out of memory", "out of memory", None]


def test_interrupt_keeps_what_was_measured(tmp_path, head, capsys):
    path = tmp_path / "speed.json"

    def interrupted():
        raise KeyboardInterrupt

    identity = {"case": {"seq": 1}, "baseline": "b", "pass": "forward"}
    work = [(identity, lambda: ROW), ({**identity, "baseline": "c"}, interrupted)]
    with pytest.raises(SystemExit, match="130"):
        command.measure_all(Results("speed", head), path, work, quiet=True)
    assert len(load(path).rows) == 1
    assert "--resume" in capsys.readouterr().err
