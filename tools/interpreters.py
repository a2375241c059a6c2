"""Finds the Python interpreters of this machine by version."""

import os
import subprocess
from pathlib import Path


def candidates(version: str) -> list[str]:
    """Commands that may be this version: on PATH, then those that pyenv and uv keep."""
    pyenv = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv")) / "versions"
    uv = Path.home() / ".local" / "share" / "uv" / "python"
    kept = [*pyenv.glob(f"{version}.*/bin/python"), *uv.glob(f"cpython-{version}.*/bin/python3")]
    return [f"python{version}", "python3", *(str(path) for path in sorted(kept, reverse=True))]


def has_headers(command: str, version: str) -> bool:
    """Whether the command runs, is this version, and can build extensions."""
    question = (
        "import os, sys, sysconfig, venv; "
        f"ok = '%d.%d' % sys.version_info[:2] == {version!r} and sys.implementation.name == 'cpython'; "
        "raise SystemExit(not (ok and os.path.exists(sysconfig.get_path('include') + '/Python.h')))"
    )
    try:
        return subprocess.run([command, "-c", question], capture_output=True, timeout=60).returncode == 0
    except OSError:
        return False


def find(version: str) -> str | None:
    """A command that runs CPython of this version ("3.11") with its headers, or None."""
    return next((command for command in candidates(version) if has_headers(command, version)), None)
