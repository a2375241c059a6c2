"""The verb primer: the first kernels, run and measured; and their host programs where nvcc is there."""

import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PROGRAMS = ["vector_add_simple", "vector_add", "matrix_add"]
EMULATED = ["primer", "--device", "emulator"]


def test_sectors_per_request(command):
    lessons = {lesson["kernel"]: lesson for lesson in command.json(*EMULATED)["lessons"]}
    assert {name: lesson["sectors_per_request"] for name, lesson in lessons.items()} == {
        "vector_add_simple": 4,
        "vector_add": 16,
        "matrix_add": 4,
        "matrix_add_by_columns": 32,
    }
    assert all(lesson["wrong"] == 0 for lesson in lessons.values())
    assert lessons["matrix_add"]["used_of_sectors"] == 1 and lessons["matrix_add_by_columns"]["used_of_sectors"] == 0.125
    assert all(lesson["bytes"] == 12 * lesson["rows"] * lesson["columns"] for lesson in lessons.values())


@pytest.mark.parametrize("size", [("1", "1"), ("3", "2"), ("37", "101")])
def test_any_size(command, size):
    lessons = command.json(*EMULATED, "--arch", "sm_80", "--rows", size[0], "--columns", size[1])["lessons"]
    assert [lesson["wrong"] for lesson in lessons] == [0, 0, 0, 0]


def test_one_lesson_in_words(command):
    text = command(*EMULATED, "matrix_add", "--rows", "8", "--columns", "100").stdout
    assert "matrix_add " in text and "vector_add" not in text and "right" in text and "WRONG" not in text


@pytest.mark.parametrize("name", PROGRAMS)
def test_source_is_the_file(command, name):
    assert command("primer", name, "--source").stdout == (ROOT / f"kernels/primer/{name}.cu").read_text()


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["nothing"], "primer: got 'nothing', allowed: vector_add_simple, vector_add"),
        (["--device", "cpu"], "--device: got cpu, allowed: cuda, cuda:N, emulator, best"),
        (["--rows", "0"], "--rows: got '0', allowed is a whole number from 1"),
    ],
)
def test_a_mistake_is_named(command, words, expected):
    assert expected in command("primer", *words, code=2).stderr


@pytest.mark.parametrize("name", PROGRAMS)
def test_the_host_program_builds_with_its_own_line(tmp_path, name):
    if shutil.which("nvcc") is None:
        pytest.skip("nvcc is not here")
    source = ROOT / f"kernels/primer/{name}.cu"
    (line,) = (line for line in source.read_text().splitlines() if "nvcc -O3" in line)
    build, run = line.split(":", 1)[1].split("&&")
    folder = shutil.copytree(source.parent, tmp_path / "primer")
    subprocess.run(build.split(), cwd=folder, check=True, timeout=120)
    if shutil.which("nvidia-smi") is None:
        return  # built; there is nothing to run it on
    assert ", 0 wrong" in subprocess.run(run.split(), cwd=folder, capture_output=True, text=True, timeout=60).stdout
