"""`make lint` and `make format`: clang-format, clang-tidy, ruff, and the table of includes.

clang-tidy looks at every file of src/ and cli/, a room at a time. Its analyzer, which follows a function's paths, sees only
what is not included by another file: it runs on the files that differ from the branch `main`, or with --all on every one,
which takes minutes.
"""

import argparse
import json
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
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


def configured(preset: str) -> list[str]:
    """The units of src/ and cli/ in a build for clang that is configured and not built."""
    build = f"build/lint-{preset}"
    settings = ["-DCMAKE_C_COMPILER=clang", "-DCMAKE_CXX_COMPILER=clang++", "-DCMAKE_DISABLE_PRECOMPILE_HEADERS=ON"]
    configure = ["cmake", "--preset", preset, "-B", build, *settings]
    done = subprocess.run(configure, cwd=ROOT, capture_output=True, text=True)
    if done.returncode != 0:
        print(f"FAILED  cmake --preset {preset}\n{done.stdout}{done.stderr}")
        return []
    libraries = ("cpu_kernels", "emulator", "cold", "objects")
    targets = (*(f"flash_attention_{name}.dir" for name in libraries), "flash-attention.dir")
    units = json.loads((ROOT / build / "compile_commands.json").read_text())
    names = [u["file"] for u in units if any(f"/{t}/" in u["command"].split(" -o ")[-1] for t in targets)]
    # The embedded kernels, alone or in their unity source, are written by a build.
    return [n for n in names if f"unity_lint-{preset}" not in n and Path(n).name != "embedded_kernels.cpp"]


def tidy(preset: str, unit: str) -> bool:
    name = Path(unit).name if "/Unity/" in unit else str(Path(unit).relative_to(ROOT))
    return step(f"clang-tidy {name}", ["clang-tidy", "-p", f"build/lint-{preset}", "--quiet", unit])


def check(everything: bool) -> bool:
    good = step("includes", [sys.executable, "tools/check_includes.py"])
    good &= step("clang-format", ["clang-format", "--dry-run", "-Werror", *tracked(*FORMATTED)])
    good &= step("ruff format", ruff("format", "-q", "--check"))
    good &= step("ruff check", ruff("check", "-q"))
    wanted = changed()
    files = [u for u in configured("dev") if everything or str(Path(u).relative_to(ROOT)) in wanted]
    rooms = [] if everything else configured("release")
    work = [("dev", unit) for unit in files] + [("release", unit) for unit in rooms]
    with ThreadPoolExecutor(max_workers=2) as pool:
        return all(list(pool.map(lambda one: tidy(*one), work))) and bool(work) and good


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--fix", action="store_true", help="rewrite instead of check")
    parser.add_argument("--all", action="store_true", help="clang-tidy's analyzer on every file")
    options = parser.parse_args()
    sys.exit(0 if (fix() if options.fix else check(options.all)) else 1)
