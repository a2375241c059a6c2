"""The worked examples of CONTRIBUTING.md apply to this tree, touch as few files as they say, and are right."""

import shutil
import subprocess
import sys

import pytest

sys.path.insert(0, str(__import__("pathlib").Path(__file__).resolve().parents[2] / "tools"))
import example_patches as patches

# The most files that are not tests; of a kernel family those outside of its folders.
FOLDERS = ("kernels/forward/sm103/", "src/plan/families/forward_sm103")
MOST = {"score_option": 14, "tile_size": 1, "kernel_family": 6}


def test_there_is_one_for_each_kind_of_change():
    assert patches.names() == sorted(MOST)
    guide = (patches.ROOT / "CONTRIBUTING.md").read_text()
    assert all(f"docs/examples_of_change/{name}.patch" in guide for name in MOST)


@pytest.mark.skipif(shutil.which("git") is None, reason="git applies them")
@pytest.mark.parametrize("name", MOST)
def test_it_applies(name):
    patch = patches.FOLDER / f"{name}.patch"
    done = subprocess.run(["git", "apply", "--check", patch], cwd=patches.ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr + "apply it with --3way, mend it, commit, tools/example_patches.py renew"
    assert patches.commands_of(name)


@pytest.mark.parametrize("name", MOST)
def test_few_files_are_touched(name):
    files = [file for file in patches.files_of(name) if not file.startswith(FOLDERS)]
    assert 0 < len(files) <= MOST[name], files


@pytest.mark.long_tail
@pytest.mark.parametrize("name", MOST)
def test_it_is_right(name, tmp_path):
    patches.check(name, tmp_path)
