"""Kernels explain themselves, and every wrapper of an instruction is used."""

import re
from collections import Counter
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


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
