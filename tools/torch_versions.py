"""Environments with the oldest and the newest torch that is supported; `make test ALL=1` runs the Python tests in them.

Only torch and what it needs are installed; all else, the package too, is taken from the environment that runs this.
"""

import re
import subprocess
import sys
import sysconfig
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
FOLDER = ROOT / "build" / "torch"


def requirements() -> dict[str, Path]:
    """{version: what is installed}, of the oldest and the newest."""
    files = [ROOT / "tools" / "requirements" / f"torch_{age}.txt" for age in ("oldest", "newest")]
    return {re.match(r"torch==([\d.]+)\n", file.read_text())[1]: file for file in files}


def versions() -> tuple[str, str]:
    oldest, newest = requirements()
    return oldest, newest


def environment(version: str) -> Path:
    """The Python of the environment, which is made once; raises CalledProcessError with pip's output."""
    folder = FOLDER / version
    python = folder / "bin" / "python"
    done = folder / "done"
    if done.exists():
        return python
    print(f"installing torch {version} into {folder.relative_to(ROOT)}: several GB", file=sys.stderr, flush=True)
    make = [sys.executable, "-m", "venv", "--clear", str(folder)]
    pip = [
        str(python),
        "-m",
        "pip",
        "install",
        "--quiet",
        "--disable-pip-version-check",
        "--no-compile",
        "--requirement",
        str(requirements()[version]),
    ]
    for command in (make, pip):
        subprocess.run(command, check=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    own = Path(
        subprocess.run(
            [python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"],
            check=True,
            capture_output=True,
            text=True,
        ).stdout.strip()
    )
    (own / "borrowed.pth").write_text(sysconfig.get_path("purelib") + "\n")  # comes after its own packages
    done.touch()
    return python
