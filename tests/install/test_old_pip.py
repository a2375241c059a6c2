"""The package builds with Debian 12's pip, which is older than `pip install -C`."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PIP = "23.0.1"


@pytest.mark.skipif(sys.version_info >= (3, 12), reason=f"pip {PIP} does not run on Python 3.12 and later")
def test_the_package_builds_with_pip_of_debian_12(tmp_path):
    fetch = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(tmp_path), f"pip=={PIP}"]
    if subprocess.run(fetch, capture_output=True).returncode:
        pytest.skip(f"pip {PIP} is not in reach")
    target = tmp_path / "installed"
    settings = {
        "PYTHONPATH": str(tmp_path / f"pip-{PIP}-py3-none-any.whl"),
        "PIP_TARGET": str(target),
        "VENV": str(Path(sys.executable).parents[1]),
    }
    environment = {**os.environ, **settings}
    told = subprocess.run([sys.executable, "-m", "pip", "--version"], capture_output=True, text=True, env=environment)
    assert told.stdout.startswith(f"pip {PIP} "), told.stdout + told.stderr
    done = subprocess.run(["tools/install_python.sh"], cwd=ROOT, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stdout + done.stderr
    there = "import flash_attention; print(flash_attention.__file__)"
    imported = subprocess.run(
        [sys.executable, "-I", "-c", f"import sys; sys.path.insert(0, {str(target)!r}); {there}"],
        capture_output=True,
        text=True,
    )
    assert imported.stdout.startswith(str(target)), imported.stderr
