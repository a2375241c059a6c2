"""`make lint` and `make format`: clang-format, clang-tidy, ruff, and the table of includes.

clang-tidy takes minutes for everything, so it looks at the files that differ from the branch `main` (or at all of them with
--all); the rest is checked in full.
"""

import argparse
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
FORMATTED = (".h", ".cpp", ".c", ".cuh", ".cu")


def tracked(*endings: str) -> list[str]:
    names = subprocess.run(
        ["git", "ls-files", "-co", "--exclude-standard"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    return [n for n in names.stdout.splitlines() if n.endswith(endings) and (ROOT / n).exists()]


def changed() -> set[str]:
    """Files that differ from main, and what is not committed."""
    base = subprocess.run(["git", "merge-base", "HEAD", "main"], cwd=ROOT, capture_output=True, text=True).stdout.strip()
    diff = subprocess.run(["git", "diff", "--name-only", base or "HEAD"], cwd=ROOT, capture_output=True, text=True)
    return set(diff.stdout.splitlines())


def step(name: str, command: list[str]) -> bool:
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    if done.returncode == 0:
        print(f"ok      {name}")
        return True
    print(f"FAILED  {name}\n{(done.stdout + done.stderr).strip()}")
    return False


def ruff(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "ruff", *arguments, "."]


def fix() -> bool:
    good = step("clang-format", ["clang-format", "-i", *tracked(*FORMATTED)])
    good &= step("ruff format", ruff("format", "-q"))
    return step("ruff check", ruff("check", "-q", "--fix")) and good


def check(everything: bool) -> bool:
    good = step("includes", [sys.executable, "tools/check_includes.py"])
    good &= step("clang-format", ["clang-format", "--dry-run", "-Werror", *tracked(*FORMATTED)])
    good &= step("ruff format", ruff("format", "-q", "--check"))
    good &= step("ruff check", ruff("check", "-q"))
    wanted = changed()
    sources = [n for n in tracked(".cpp") if n.startswith(("src/", "cli/")) and (everything or n in wanted)]
    sources = [n for n in sources if not n.startswith(("src/cpu/isa/", "src/emulator/runtime/"))]
    if sources:
        good &= step("configure", ["cmake", "--preset", "dev"])
        good &= step(f"clang-tidy, {len(sources)} files", ["clang-tidy", "-p", "build/dev", "--quiet", *sources])
    return good


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--fix", action="store_true", help="rewrite instead of check")
    parser.add_argument("--all", action="store_true", help="clang-tidy on every file")
    options = parser.parse_args()
    sys.exit(0 if (fix() if options.fix else check(options.all)) else 1)
