"""A folder fits in one view."""

import subprocess
from collections import Counter
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
MOST = 25


def test_no_folder_has_more_than_25_files():
    done = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=False)
    if done.returncode:
        pytest.skip("not a checkout")
    held = Counter(Path(name).parent.as_posix() for name in done.stdout.splitlines() if (ROOT / name).is_file())
    assert {folder: count for folder, count in held.items() if count > MOST} == {}
