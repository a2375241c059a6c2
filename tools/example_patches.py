"""The worked examples of CONTRIBUTING.md: patches in docs/examples_of_change, each with the lines that check it.

    python tools/example_patches.py check [NAME ...]    applies each to a copy of the tree, builds it and runs its checks
    python tools/example_patches.py renew NAME          writes the patch anew from the last commit of this tree

A patch begins with text: what it does, and a line "Check: COMMAND" for each command. Commands run in the root of the copy,
by bash; $PYTHON is the Python that runs this file.
"""

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
FOLDER = ROOT / "docs" / "examples_of_change"


def names() -> list[str]:
    return sorted(path.stem for path in FOLDER.glob("*.patch"))


def text_of(name: str) -> str:
    return (FOLDER / f"{name}.patch").read_text()


def files_of(name: str) -> list[str]:
    """What the patch changes, but for tests."""
    found = re.findall(r"^diff --git a/(\S+) b/", text_of(name), re.MULTILINE)
    return [file for file in found if not file.startswith("tests/")]


def commands_of(name: str) -> list[str]:
    return re.findall(r"^Check: (.+)$", text_of(name).partition("\ndiff --git")[0], re.MULTILINE)


def copy_tree(to: Path) -> None:
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, check=True, capture_output=True).stdout.decode()
    for file in filter(None, listed.split("\0")):
        if (ROOT / file).is_file():
            (to / file).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / file, to / file)


def check(name: str, folder: Path) -> None:
    """Raises CalledProcessError if the patch does not apply, the tree does not build or a check fails."""
    copy_tree(folder)
    patch = FOLDER / f"{name}.patch"
    outside = {**os.environ, "PYTHON": sys.executable, "GIT_CEILING_DIRECTORIES": str(folder.parent)}
    subprocess.run(["git", "apply", str(patch)], cwd=folder, check=True, env=outside)
    for command in commands_of(name):
        print(f"{name}: {command}", flush=True)
        subprocess.run(["bash", "-c", command], cwd=folder, check=True, env=outside)


def renew(name: str) -> None:
    path = FOLDER / f"{name}.patch"
    head = path.read_text().partition("\ndiff --git")[0]
    command = ["git", "diff", "-U1", "HEAD~1", "HEAD"]  # little context: it is to apply after other changes, too
    diff = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout
    path.write_text(head + "\n" + diff)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("verb", choices=("check", "renew"))
    parser.add_argument("names", nargs="*")
    given = parser.parse_args()
    for name in given.names or names():
        if given.verb == "renew":
            renew(name)
        else:
            with tempfile.TemporaryDirectory() as folder:
                check(name, Path(folder))
    return 0


if __name__ == "__main__":
    sys.exit(main())
