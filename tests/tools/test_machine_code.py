"""tools/machine_code.py: what it takes of a cubin, and what it says about two records."""

import struct
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tools"))

import machine_code  # noqa: E402

PROGBITS, NOBITS = 1, 8


def elf(sections: list[tuple[str, int, bytes]]) -> bytes:
    """A 64-bit ELF file of these sections (name, kind, bytes), and of their names."""
    names = b"\0"
    headers, body = [bytes(64)], b""
    for name, kind, data in [*sections, (".shstrtab", 3, b"")]:
        at = len(names)
        names += name.encode() + b"\0"
        headers.append((at, kind, data))
    packed = [headers[0]]
    for at, kind, data in headers[1:-1]:
        packed.append(struct.pack("<IIQQQQ", at, kind, 0, 0, 64 + len(body), len(data)) + bytes(24))
        body += b"" if kind == NOBITS else data
    packed.append(struct.pack("<IIQQQQ", headers[-1][0], 3, 0, 0, 64 + len(body), len(names)) + bytes(24))
    body += names
    start = b"\x7fELF\x02" + bytes(35) + struct.pack("<Q", 64 + len(body))
    start += bytes(58 - len(start)) + struct.pack("<HHH", 64, len(packed), len(packed) - 1)
    return start + body + b"".join(packed)


BASE = [(".text.kernel", PROGBITS, b"code"), (".nv.constant2", PROGBITS, b"table"), (".nv.info", PROGBITS, b"facts")]


def test_the_hash_is_of_code_and_constants():
    whole = machine_code.machine_code(elf(BASE))
    renamed = [
        (".text.other", PROGBITS, b"code"),
        BASE[1],
        (".nv.info", PROGBITS, b"other"),
        (".nv.constant0", PROGBITS, b"1"),
    ]
    assert machine_code.machine_code(elf(renamed)) == whole
    assert machine_code.machine_code(elf([(".text.kernel", PROGBITS, b"cods"), *BASE[1:]])) != whole
    assert machine_code.machine_code(elf([BASE[0], (".nv.constant2", PROGBITS, b"tablo"), BASE[2]])) != whole


def test_other_registers_are_told_from_other_instructions():
    first, moved, other = (bytes([0x10, 0x72, *rest, *bytes(13)]) for rest in ([5], [6], [5]))
    other = bytes([0x11, *other[1:]])
    code = {
        name: machine_code.machine_code(elf([(".text.kernel", PROGBITS, text)]))
        for name, text in {"first": first, "moved": moved, "other": other}.items()
    }
    record = {name: {"A.B#0.0": [text, "168", "0", "0", "1.0", "k"]} for name, text in code.items()}
    assert machine_code.report(record["first"], record["moved"])[0][0] == "other registers: A.B#0.0  k"
    assert machine_code.report(record["first"], record["other"])[0][0].startswith("changed: A.B#0.0")


def test_what_is_no_cubin_is_refused():
    with pytest.raises(AssertionError, match="ELF"):
        machine_code.machine_code(b".version 8.0")


def test_a_line_says_which_kernel_it_is_without_its_configuration():
    kernel = machine_code.Kernel("A.B#0.1", "backward/sm90 sm_90a Config{.x = 1}", "1.2345", "f", "168", "0", "0")
    assert kernel.line("cafe").split("\t") == ["A.B#0.1", "cafe", "168", "0", "0", "1.2", "backward/sm90 sm_90a Config"]


def test_a_record_forgets_places_that_a_test_has_no_more():
    old = {place: [code] for place, code in {"A.B#0.0": "a", "A.B#7.0": "b", "C.D#0.0": "c"}.items()}
    assert machine_code.merged(old, {"A.B#0.0": ["x"]}, {"A.B#0.0", "A.B#1.0"}) == {"A.B#0.0": ["x"], "C.D#0.0": ["c"]}


def test_equal_changed_and_unknown_kernels_are_told_apart():
    old = {"A.B#0.0": ["aa", "168", "0", "0", "1.0", "k"], "A.B#0.1": ["bb", "168", "0", "0", "1.0", "k"]}
    lines, same = machine_code.report(old, old)
    assert same and lines == ["2 equal, 0 in other registers, 0 changed, 0 not in the record"]
    new = old | {"A.B#0.1": ["cc", "255", "8", "1", "1.0", "k"], "A.B#1.0": ["dd", "1", "0", "0", "1.0", "k"]}
    lines, same = machine_code.report(old, new)
    assert not same
    assert lines == [
        "not in the record: A.B#1.0  k",
        "changed: A.B#0.1  k  registers 168 -> 255, spills 0 -> 8, wgmma warnings 0 -> 1",
        "1 equal, 0 in other registers, 1 changed, 1 not in the record",
    ]
