"""Plants mistakes of meaning (tools/plants/) one at a time and runs the test that each of them names.

A plant in kernels/ needs no build: the library reads the sources through FLASH_ATTENTION_KERNEL_DIR. One in python/ is put
into a copy of the installed package. All others are planted in a copy of the tree, build/plants, which is built again for
each. The tree itself is never changed.
"""

import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from plants.plant import ROOT, Plant, plants_of

COPY = ROOT / "build" / "plants"
COPIED = (
    *("CMakeLists.txt", "CMakePresets.json", "LICENSE", "README.md", "VERSION"),
    *("bench", "cmake", "cli", "include", "kernels", "src", "tests"),
)
LIMIT_S = 1800
OVERDUE = 124


def call(command: list, folder: Path, environment: dict[str, str] | None = None) -> tuple[int, str]:
    try:
        done = subprocess.run(
            [str(part) for part in command],
            cwd=folder,
            env={**os.environ, **(environment or {})},
            capture_output=True,
            text=True,
            errors="replace",
            timeout=LIMIT_S,
        )
    except subprocess.TimeoutExpired:
        return OVERDUE, f"still running after {LIMIT_S} s"
    return done.returncode, done.stdout + done.stderr


def verdict(code: int, output: str) -> str:
    """How a failing test found the mistake; empty where all passed."""
    if re.search(r"^\[=+\] Running 0 tests|no tests ran|could not compile", output, re.MULTILINE):
        return "NO TEST: " + output.strip().splitlines()[-1]
    if code == OVERDUE:  # found nothing: a mistake that hangs a kernel is a deadlock, which the emulator names
        return "NOT FINISHED: " + output
    if code == 0:
        return ""
    failed = re.findall(r"^(?:\[  FAILED  \]|FAILED) (\S+)", output, re.MULTILINE)
    return failed[0].rstrip(",") if failed else f"exit code {code}"


def gtest(plant: Plant, build: Path, environment: dict[str, str] | None = None) -> str:
    words = plant.test.split()
    settings = dict(word.split("=", 1) for word in words if "=" in word)
    program, *filters = (word for word in words if "=" not in word)
    command = [build / "tests" / program, f"--gtest_filter={':'.join(filters) or '*'}", "--gtest_fail_fast"]
    return verdict(*call(command, ROOT, {**(environment or {}), **settings}))


def try_kernel(plant: Plant, planted: bool) -> str:
    with tempfile.TemporaryDirectory(prefix="planted_bug_") as folder:
        for part in ("kernels", "src/emulator/runtime"):  # the emulator's side of the wrappers is next to the kernels
            shutil.copytree(ROOT / part, Path(folder) / part)
        if planted:
            (Path(folder) / plant.file).write_text(plant.applied())
        places = {"FLASH_ATTENTION_KERNEL_DIR": f"{folder}/kernels", "FLASH_ATTENTION_CACHE_DIR": f"{folder}/cache"}
        return gtest(plant, ROOT / "build" / "release", places)


def try_python(plant: Plant, planted: bool) -> str:
    with tempfile.TemporaryDirectory(prefix="planted_bug_") as folder:
        _, found = call([sys.executable, "-c", "import flash_attention as f; print(f.__path__[0])"], Path("/"))
        package = Path(folder) / "flash_attention"
        shutil.copytree(found.strip().splitlines()[-1], package)
        if planted:
            (package / Path(plant.file).relative_to("python/flash_attention")).write_text(plant.applied())
        command = [sys.executable, "-m", "pytest", "-x", "-q", *shlex.split(plant.test)]
        return verdict(*call(command, ROOT, {"PYTHONPATH": folder}))


def refresh_copy() -> None:
    """Brings build/plants up to date; what has not changed keeps its time, so that it is not built again."""
    for part in COPIED:
        for source in [ROOT / part] if (ROOT / part).is_file() else sorted((ROOT / part).rglob("*")):
            target = COPY / source.relative_to(ROOT)
            if source.is_dir() or "__pycache__" in source.parts:
                continue
            if not target.exists() or target.read_bytes() != source.read_bytes():
                target.parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(source, target)
    for target in (path for part in COPIED for path in (COPY / part).rglob("*") if path.is_file()):
        if not (ROOT / target.relative_to(COPY)).exists():
            target.unlink()
    if not (COPY / "build" / "release" / "build.ninja").exists():
        code, output = call(["cmake", "--preset", "release"], COPY)
        if code:
            raise SystemExit(output)


def try_library(plant: Plant, planted: bool) -> str:
    refresh_copy()
    if planted:
        (COPY / plant.file).write_text(plant.applied())
    command = [word for word in plant.test.split() if "=" not in word]
    programs = ["flash-attention"] if command[0].startswith("tests/") else [command[0]]
    code, output = call(["ninja", "-C", COPY / "build" / "release", *programs], COPY)
    if code:
        return "DOES NOT COMPILE: " + next((line for line in output.splitlines() if "error:" in line), output[-300:])
    if programs == ["flash-attention"]:
        pytest = [sys.executable, "-m", "pytest", "-x", "-q", *shlex.split(plant.test)]
        return verdict(*call(pytest, ROOT, {"FLASH_ATTENTION_COMMAND": f"{COPY}/build/release/flash-attention"}))
    return gtest(plant, COPY / "build" / "release")


def plant_room(room: str, only: set[int], listing: bool, dry: bool) -> int:
    """Returns how many mistakes survived that a test should have found. dry: the tests without the mistakes."""
    chosen = [(i, plant) for i, plant in enumerate(plants_of(room), start=1) if not only or i in only]
    survivors = 0
    for number, plant in chosen:
        label = f"{room} {number:3}  {plant.file}: {plant.says}"
        if listing:
            print(f"{label}  [{plant.survives or plant.test}]")
            continue
        start = time.monotonic()
        trial = {"kernels": try_kernel, "python": try_python}.get(plant.file.split("/")[0], try_library)
        found = trial(plant, not dry)
        wrong = bool(found) if dry else not found or found.startswith(("NO TEST", "NOT FINISHED", "DOES NOT COMPILE"))
        survivors += wrong and not plant.survives
        outcome = found or ("passes" if dry else f"survives: {plant.survives}" if plant.survives else "SURVIVED")
        print(f"{label}  {time.monotonic() - start:.0f} s: {outcome}", flush=True)
    if not listing:
        print(f"{room}: {len(chosen)} mistakes, {survivors} {'fail unplanted' if dry else 'survived'}")
    return survivors
