"""Each option of src/api/option_table.h that Problem has, by a flag of the command: its value is in the JSON of `plan`."""

import os
import re
from pathlib import Path

import pytest

TABLE = (Path(__file__).resolve().parents[2] / "src" / "api" / "option_table.h").read_text()
ROWS = re.findall(r"^  X\((number|integer|flag|text|optional_number), (\w+), .*, (\w+), \w+\)", TABLE, re.MULTILINE)
VALUES = {"number": 0.25, "integer": 3, "flag": True, "text": "tf32"}
FLAGS = {
    "window_left": ["--window", "3,-1"],
    "window_right": ["--window", "-1,3"],
    "dropout_p": ["--dropout", "0.25"],
    "attention_chunk": ["--chunk", "3"],
}
# Statistics are tensors of their own, which the command has no place for.
WITHOUT_A_FLAG = {"scale", "return_max_logit", "return_key_mass", "return_entropy"}
OPTIONS = {name: kind for kind, name, form in ROWS if form == "same" and name not in WITHOUT_A_FLAG}


def test_the_table_is_read():
    assert {"softcap", "causal", "dropout_p", "attention_chunk", "precision"} <= set(OPTIONS)


@pytest.mark.parametrize("name", OPTIONS)
def test_the_command_has_a_flag_for_it(command, name):
    value = VALUES[OPTIONS[name]]
    flag = f"--{name.replace('_', '-')}"
    words = FLAGS.get(name) or ([flag] if value is True else [flag, str(value)])
    assert command.json("plan", *words)["problem"][name] == value
    assert command.json("plan")["problem"][name] != value


@pytest.mark.parametrize("value, words, invariant", [("1", [], True), ("", [], False), ("", ["--invariant"], True)])
def test_the_environment_gives_the_default_of_invariant(command, value, words, invariant):
    settings = {"env": {**os.environ, "FLASH_ATTENTION_INVARIANT": value}}
    assert command.json("plan", *words, **settings)["problem"]["invariant"] is invariant
    assert (", invariant" in command("plan", *words, **settings).stdout) is invariant
