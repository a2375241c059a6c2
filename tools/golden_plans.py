#!/usr/bin/env python3
"""Shows how plans differ from those of a commit, and writes the records of tests/plan/golden_test.cpp.

tools/golden_plans.py [--base COMMIT] [--update]

The plans of the base (HEAD) are made once for each commit, by a build in build/golden_plans. The output is the difference
of the whole texts: launches, configurations, workspace, tensor maps and reasons. --update writes tests/plan/golden/.
"""

import argparse
import os
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
FOLDER = ROOT / "build/golden_plans"
GOLDEN = ROOT / "tests/plan/golden"


def git(*words: str) -> str:
    return subprocess.run(["git", *words], cwd=ROOT, check=True, capture_output=True, text=True).stdout.strip()


def write_plans(tree: Path, folder: Path) -> None:
    """Builds the tests of the planner in a tree, which then write the texts of all plans to the folder."""
    subprocess.run(["tools/build.sh", "release", "plan_test"], cwd=tree, check=True)
    folder.mkdir(parents=True, exist_ok=True)
    subprocess.run(
        [tree / "build/release/tests/plan_test", "--file=plan/golden_test.cpp"],
        env={**os.environ, "FLASH_ATTENTION_GOLDEN_PLANS": str(folder)},
        stdout=subprocess.DEVNULL,
        check=True,
    )


def plans_of(commit: str) -> Path:
    folder = FOLDER / commit
    if not folder.exists():
        tree = FOLDER / "tree"
        if not tree.exists():
            git("worktree", "add", "--detach", str(tree), commit)
        subprocess.run(["git", "checkout", "-q", "--detach", commit], cwd=tree, check=True)
        write_plans(tree, folder)
    return folder


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--base", default="HEAD", help="the commit to compare with")
    parser.add_argument("--update", action="store_true", help="write the records")
    given = parser.parse_args()
    base, now = plans_of(git("rev-parse", given.base)), FOLDER / "now"
    shutil.rmtree(now, ignore_errors=True)
    write_plans(ROOT, now)
    if given.update:
        for record in sorted(now.glob("*.record")):
            shutil.copy(record, GOLDEN / f"{record.stem}.txt")
    command = ["diff", "--recursive", "--unified=1", "--exclude=*.record", base, now]
    return subprocess.run(command, check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
