"""The verb tune: measures, keeps, exports, imports and refuses. `plan` says where a choice is used."""

import json

import pytest

PROBLEM = {"seq_q": 1, "seq_kv": 4000, "heads_q": 4, "heads_kv": 2, "head_dim": 64}


@pytest.fixture
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("FLASH_ATTENTION_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.delenv("FLASH_ATTENTION_TUNED", raising=False)
    return tmp_path


def test_tune_measures_and_keeps(command, own_cache):
    problems = own_cache / "problems.json"
    cases = [{"pass": "forward", "problem": dict(PROBLEM, seq_kv=n)} for n in (300, 4000)]
    problems.write_text(json.dumps([*cases, {"pass": "backward", "problem": PROBLEM}]))
    words = ["tune", "--device", "cpu", "--problems", problems, "--budget", 30]
    first = command.json(*words)
    assert first["finished"] and first["path"].startswith(str(own_cache / "cache" / "tuned"))
    for result in first["results"]:
        assert "skipped" not in result and result["usual_s"] > 0 and result["contestants"] >= 1 and not result["dropped"]
        assert (result["choice"] == result["usual"]) == (result["gain"] == 1)
    assert all(result["skipped"] == "tuned before" for result in command.json(*words)["results"])
    assert all("skipped" not in result for result in command.json(*words, "--again")["results"])
    assert command.json("tune", "--device", "cpu", "--problems", problems, "--time")["results"][0]["s"] > 0


def test_export_import_and_plan(command, own_cache):
    words = ["--device", "cpu", "--seq-q", 1, "--seq-kv", 4000, "--heads", 4, "--kv-heads", 2]
    command("tune", *words, "--budget", 20)
    shared = own_cache / "shared.json"
    command("tune", "--device", "cpu", "--budget", 0, "--export", shared)
    text = shared.read_text()
    assert json.loads(text)["choices"][0]["problem"]["seq_kv"] == 4000
    assert "1 choices" in command("tune", "--device", "cpu", "--import", shared).stdout
    shared.write_text(text.replace('"threads"', '"theads"'))
    assert "it is damaged" in command("tune", "--device", "cpu", "--import", shared, code=2).stderr
    assert "no file of tuned choices" in command("tune", "--device", "cpu", "--import", __file__, code=2).stderr
    assert "cannot read" in command("tune", "--device", "cpu", "--import", own_cache / "none", code=2).stderr


def test_tune_refuses_an_emulator(command):
    assert "say nothing" in command("tune", "--device", "emulator", code=2).stderr
