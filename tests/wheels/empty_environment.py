"""A Python environment with nothing but what a test puts there, and programs that see nothing else of this machine."""

import importlib.metadata
import os
import re
import subprocess
from pathlib import Path


class Environment:
    """A virtual environment; what runs in it has no compiler on its PATH and no variable of this process."""

    def __init__(self, folder: Path, command: str):
        self.folder = folder
        subprocess.run([command, "-m", "venv", str(folder)], check=True, capture_output=True)
        self.python = folder / "bin" / "python"
        self.lent: Path | None = None

    def install(self, *words: object, **more: str) -> None:
        """By pip, which may use the network that this process has."""
        command = [str(self.python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check", *map(str, words)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=1200, env={**os.environ, **more})
        assert done.returncode == 0, done.stdout + done.stderr

    def lend(self, *names: str) -> None:
        """Makes these distributions of the running Python, and what they need, importable; nothing is copied."""
        self.lent = self.folder / "lent"
        self.lent.mkdir(exist_ok=True)
        todo, seen = list(names), set()
        while todo:
            name = todo.pop()
            if name in seen:
                continue
            seen.add(name)
            try:
                distribution = importlib.metadata.distribution(name)
            except importlib.metadata.PackageNotFoundError:
                continue  # of another platform, or of an extra
            for top in {file.parts[0] for file in distribution.files or [] if file.parts[0] != ".."}:
                if not (self.lent / top).exists():
                    (self.lent / top).symlink_to(distribution.locate_file(top))
            needs = distribution.requires or []
            todo += [re.match(r"[\w.-]+", need).group() for need in needs if "extra ==" not in need]

    def run(self, program: str, **more: str) -> str:
        paths = {"PATH": str(self.folder / "bin"), "HOME": str(self.folder)}
        lent = {"PYTHONPATH": str(self.lent)} if self.lent else {}
        done = subprocess.run(
            [str(self.python), "-c", program],
            capture_output=True,
            text=True,
            timeout=300,
            env={**paths, **lent, **more},
            cwd=self.folder,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout
