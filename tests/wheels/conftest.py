"""The wheels under test: those of FLASH_ATTENTION_WHEELS (`make wheels-test`), else made for the run (ALL=1)."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tools"))


@pytest.fixture(scope="session")
def wheels(tmp_path_factory) -> Path:
    given = os.environ.get("FLASH_ATTENTION_WHEELS")
    if given:
        return Path(given)
    folder = tmp_path_factory.mktemp("dist")
    done = subprocess.run(
        [sys.executable, "tools/wheels.py", "--output", str(folder)], cwd=ROOT, capture_output=True, text=True
    )
    assert list(folder.glob("*.whl")), done.stdout + done.stderr
    return folder
