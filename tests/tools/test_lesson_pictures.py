"""The pictures of the primer and the ladder are what the kernels do: drawn again from their code, they are the same."""

import dataclasses
import itertools
import shutil
import subprocess
import sys
from collections import defaultdict
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tools"))
from lessons.pictures import PICTURES  # noqa: E402
from lessons.recording import record  # noqa: E402
from lessons.replay import Replay  # noqa: E402

COMMAND = ROOT / "build/release/flash-attention"
pytestmark = [
    pytest.mark.skipif(not COMMAND.exists(), reason="build/release/flash-attention is not built"),
    pytest.mark.skipif(shutil.which("c++") is None, reason="no C++ compiler"),
]


@pytest.mark.parametrize("name", PICTURES)
def test_a_picture_is_that_of_its_kernel(name):
    drawn = PICTURES[name](str(COMMAND))
    assert (ROOT / name).read_text() == drawn, "python3 tools/draw_lessons.py draws it again"


@pytest.mark.parametrize("name", PICTURES)
def test_a_picture_is_on_a_page(name):
    pages = [*(ROOT / "docs").glob("*.md"), *(ROOT / "docs/ladder").glob("*.md")]
    assert any(Path(name).name in page.read_text() for page in pages)


WEIGHTS = {0: 32, 128: 128, 256: 128}  # recorded threads of 13_warp_specialised, and how many do as each does


def steps_of(edits: dict[str, str]) -> dict:
    """The steps of 13_warp_specialised, each of these texts in its source replaced by another."""
    recorder = record(str(COMMAND), "13_warp_specialised", 512)
    tree = recorder.program.parent / "edited"
    shutil.copytree(ROOT / "kernels", tree, dirs_exist_ok=True)
    rung = tree / "ladder/13_warp_specialised.cu"
    text = rung.read_text()
    for old, new in edits.items():
        assert text.count(old) == 1
        text = text.replace(old, new)
    rung.write_text(text)
    config = "ForwardConfig{.features = {.dtype = Type::bfloat16}, .head_dim = 128, .head_dim_v = 128, .block_q = 128,"
    config += " .block_kv = 128, .num_warps = 12, .num_stages = 2}"
    words = ["c++", "-std=c++20", "-w", "-O0", "-I", ROOT / "src/emulator/runtime", "-I", tree]
    words += ['-DRUNG="ladder/13_warp_specialised.cu"', f"-DCONFIG={config}", "-o", tree / "recorder"]
    subprocess.run([*words, ROOT / "tools/lessons/recorder.cpp"], check=True)
    return dataclasses.replace(recorder, program=tree / "recorder").steps(*WEIGHTS)


def test_the_order_is_one_that_the_kernel_allows():
    """By the rules of attention, not by the replay's: a product after its copy, a softmax after its scores, and so on."""
    boxes = Replay(record(str(COMMAND), "13_warp_specialised", 512).steps(*WEIGHTS), WEIGHTS, 1).run()
    boxes = [box for box in boxes if box.row != "stores"]
    ends, begins = defaultdict(dict), defaultdict(dict)
    for box in boxes:
        ends[box.what, box.actor][box.number] = box.end
        begins[box.what, box.actor][box.number] = box.begin
    for group in (128, 256):
        for tile in range(4):
            assert begins["S", group][tile] >= ends["K", 0][tile]
            assert begins["softmax", group][tile] >= ends["S", group][tile]
            assert begins["O", group][tile] >= max(ends["softmax", group][tile], ends["V", 0][tile])
        for tile in range(2, 4):  # two stages: the copy waits for the products of the tile that was there
            assert begins["K", 0][tile] >= ends["S", group][tile - 2]
            assert begins["V", 0][tile] >= ends["O", group][tile - 2]
    busy = sorted((box.begin, box.end) for box in boxes if box.row == "products")
    assert all(first[1] <= second[0] for first, second in itertools.pairwise(busy))


K_IS_EMPTY = "      release(storage.K_empty[stage]);\n"
V_IS_EMPTY = "      release(storage.V_empty[stage]);\n"


def third_copy(steps) -> float:
    return next(box.begin for box in Replay(steps, WEIGHTS, 1).run() if box.what == "K" and box.number == 2)


def test_another_order_in_the_kernel_is_another_picture():
    """A stage that is given up later is filled later."""
    late = steps_of({K_IS_EMPTY: "", V_IS_EMPTY: V_IS_EMPTY + K_IS_EMPTY})
    assert third_copy(late) > third_copy(steps_of({}))


def test_a_kernel_that_hangs_has_no_picture():
    with pytest.raises(RuntimeError, match="wait for ever"):
        Replay(steps_of({K_IS_EMPTY: ""}), WEIGHTS, 1).run()
