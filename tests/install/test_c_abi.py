"""The C ABI: what the record promises is there, where it was, and the library exports every function of the header."""

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tools"))
import c_abi  # noqa: E402


def test_nothing_that_was_promised_is_lost_or_moved():
    lost = set(c_abi.RECORD.read_text().splitlines()) - set(c_abi.describe())
    assert not lost, "breaks programs that are linked already; a new major version may: tools/c_abi.py --write"


def test_fields_are_only_added_at_the_end():
    """A field that is not in the record lies behind every recorded one of its struct."""
    recorded = c_abi.RECORD.read_text().splitlines()
    for line in set(c_abi.describe()) - set(recorded):
        if not (match := re.match(r"field (\w+)\.\w+ (\d+)", line)):
            continue
        before = [int(m[1]) for old in recorded if (m := re.match(rf"field {match[1]}\.\w+ (\d+)", old))]
        assert int(match[2]) > max(before, default=-1), line


def test_the_library_exports_every_function():
    library = ROOT / "build" / "release" / "libflash_attention.so"
    table = subprocess.run(["nm", "-D", "--defined-only", str(library)], capture_output=True, text=True, check=True).stdout
    exported = {line.split()[-1] for line in table.splitlines()}
    assert set(c_abi.functions(c_abi.HEADER.read_text())) <= exported


def test_the_version_is_said_once():
    version = (ROOT / "VERSION").read_text().strip()
    assert f"\nversion: {version}\n" in (ROOT / "CITATION.cff").read_text()
    assert f'version = "{version}"' in (ROOT / "examples" / "rust" / "Cargo.toml").read_text()
    assert f"\n## {version}\n" in (ROOT / "CHANGELOG.md").read_text()
