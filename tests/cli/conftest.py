import json
import os
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
COMMAND = Path(os.environ.get("FLASH_ATTENTION_COMMAND", ROOT / "build" / "release" / "flash-attention"))


class Command:
    """Runs `flash-attention` and hands back what it printed."""

    path = COMMAND

    def __call__(self, *words: object, code: int = 0, **settings: object) -> subprocess.CompletedProcess:
        done = subprocess.run([COMMAND, *map(str, words)], capture_output=True, text=True, timeout=300, **settings)
        assert done.returncode == code, f"exit code {done.returncode}, expected {code}\n{done.stdout}\n{done.stderr}"
        return done

    def json(self, *words: object, code: int = 0, **settings: object) -> dict:
        return json.loads(self(*words, "--json", code=code, **settings).stdout)


@pytest.fixture(scope="session")
def command() -> Command:
    assert COMMAND.exists(), f"{COMMAND} is not built; `make test` builds it"
    return Command()


@pytest.fixture(scope="session")
def doctors_report(command) -> dict:
    """What `doctor` says of this machine: seconds of self-tests, once."""
    return command.json("doctor")
