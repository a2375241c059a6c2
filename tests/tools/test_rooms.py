"""A folder fits in one view, and so does a kernel."""

import re
import subprocess
from collections import Counter
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
MAX_FILES = 25
MAX_LINES = 250


def test_no_folder_has_more_than_25_files():
    done = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=False)
    if done.returncode:
        pytest.skip("not a checkout")
    held = Counter(Path(name).parent.as_posix() for name in done.stdout.splitlines() if (ROOT / name).is_file())
    assert {folder: count for folder, count in held.items() if count > MAX_FILES} == {}


def test_no_kernel_file_has_more_than_250_lines():
    # But for rungs, which are read from top to end.
    files = [path for path in (ROOT / "kernels").rglob("*.cuh") if "ladder" not in path.parts]
    lines = {path.relative_to(ROOT).as_posix(): path.read_text().count("\n") for path in files}
    assert files
    assert {name: count for name, count in lines.items() if count > MAX_LINES} == {}


def entry_files():
    """Files of kernels that hold an entry: a function that takes the arguments of a launch and nothing else."""
    entry = re.compile(r"^__device__ __forceinline__ void \w+\(const (?:abi::)?\w*Args& args\) \{", re.MULTILINE)
    rooms = ("forward", "backward", "decode", "mask", "standard")
    files = [path for room in rooms for path in sorted((ROOT / "kernels" / room).rglob("*.cuh"))]
    return [path for path in files if entry.search(path.read_text())]


@pytest.mark.parametrize("path", entry_files(), ids=lambda path: path.relative_to(ROOT).as_posix())
def test_a_kernel_opens_with_its_loop_in_pseudo_code(path):
    """As indented lines of the comment at its top."""
    head = path.read_text().split("\nnamespace ")[0]
    assert re.search(r"^//  +\S", head, re.MULTILINE)


def test_the_kernels_are_found():
    assert len(entry_files()) > 20


def test_every_wrapper_of_an_instruction_is_used_by_a_kernel():
    wrapper = re.compile(r"^__device__ __forceinline__ [\w ]+?\b(\w+)\(", re.MULTILINE)
    words = Counter(word for path in (ROOT / "kernels").rglob("*.cu*") for word in re.findall(r"\w+", path.read_text()))
    names = {name for path in (ROOT / "kernels/ptx").glob("*.cuh") for name in wrapper.findall(path.read_text())}
    assert len(names) > 60
    assert [name for name in sorted(names) if words[name] < 2] == []
