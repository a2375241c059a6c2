"""Plants bugs in a kernel, one at a time, and runs its emulated test: which are found without a GPU?

    tools/plant_bugs.py forward/sm80            every bug of the kernel; survivors are listed at the end
    tools/plant_bugs.py forward/sm80 --list     what would be planted
    tools/plant_bugs.py forward/sm80 --only 3,7 some of them
    tools/plant_bugs.py forward/sm80 --slips 20 twenty slips instead, drawn at random (--seed)
    tools/plant_bugs.py --meaning api           mistakes of meaning, those of tools/plants/api.py (or: all); --list, --only
    tools/plant_bugs.py --meaning api --dry     the tests that they name, without the mistakes: all must pass

A bug is a call that orders something (a barrier, a wait, an arrival, a commit, a fence) taken out, a wait for groups that
lets one group more run on, or a wait for the other phase. A slip is a typing mistake: a comparison that is off by one or
the wrong way round, a lost + 1, "or" for "and", a sum that is overwritten, a missing scale, a wrong sign. The bugs
of a kernel are those of its file in kernels/ and of all files that it includes, but for the wrappers in kernels/ptx. The
library reads the changed sources through FLASH_ATTENTION_KERNEL_DIR. A few telling cases run first, then all of the file;
the first failure ends a bug's run.

A survivor is either a missing case or a change that makes no difference in the emulator. In the second case, a call that
orders something has the words "not found by the emulator:" and the reason in a comment on its line, and is not planted.
Slips may change only the speed of a kernel: a person has to check each survivor.
"""

import argparse
import dataclasses
import os
import random
import re
import shutil
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from planting import plant_room
from plants.plant import rooms

ROOT = Path(__file__).resolve().parent.parent
KERNELS = ROOT / "kernels"
PROGRAM = ROOT / "build" / "release" / "tests" / "kernels_emulated_test"
LIMIT_S = 1800
TELLING = (
    "plain",
    "tile_multiple",
    "long_",
    "causal_square",
    "head_dim_128",
    "head_dim_256",
    "packed_causal",
    "nan_value",
    "everything",
)
NOT_COMPILED = "could not compile"
EXPLAINED = "not found by the emulator:"
OVERDUE = "still running"  # found nothing: a kernel that hangs is a deadlock, which the emulator names

CALL = re.compile(
    r"(?:ptx::(?:barrier_|mbarrier_|cluster_|copy_async_|wgmma_|bulk_|tmem_|tcgen05_)(?:sync|sync_apart|arrive|wait|commit|"
    r"fence|init|init_fence|arrive_expect_tx|mbarrier_arrive|wait_read|wait_load|wait_store|fence_before|fence_after|dealloc)|"
    r"ptx::fence_\w+|__syncthreads|__syncwarp)(?:<[^;{}]*?>)?\("
)
GROUPS = re.compile(r"((?:copy_async|wgmma|bulk)_wait(?:_read)?)<(\d+)>")
PHASE = re.compile(r"^ptx::mbarrier_wait\((.*)\)$", re.DOTALL)
SLIPS = {
    " < ": " <= ",
    " <= ": " < ",
    " > ": " >= ",
    " >= ": " > ",
    " == ": " != ",
    " != ": " == ",
    " && ": " || ",
    " || ": " && ",
    " + 1": "",
    " - 1": "",
    " ^ 1": "",
    " += ": " = ",
    " *= ": " = ",
    " % ": " / ",
    " - ": " + ",
    " * args.scale": "",
    "args.scale": "1.0f",
    "args.keep_scale": "1.0f",
    "smaller(": "larger(",
    "larger(": "smaller(",
    " 8 * ": " 4 * ",
    " = 0;": " = 1;",
    "begin, ": "begin + 1, ",
    ", true": ", false",
    "true>": "false>",
}
NO_SLIP = re.compile(r"^\s*(//|#|static_assert|template|using|enum|static constexpr|constexpr)")


@dataclasses.dataclass(frozen=True)
class Bug:
    path: str  # below kernels/
    line: int
    what: str
    text: str  # of the whole file, changed


def includes(path: str) -> list[str]:
    """The file and all it includes, but for the wrappers and the plain structs."""
    found, todo = [], [path]
    while todo:
        name = todo.pop(0)
        if name in found or name.startswith(("ptx/", "abi/")):
            continue
        found.append(name)
        todo += re.findall(r'^#include "([^"]+)"', (KERNELS / name).read_text(), re.MULTILINE)
    return found


def files_of(kernel: str) -> list[str]:
    """The files of a kernel or of a folder: forward/sm80, backward/sm90 (all of it), backward/sm90/wide (one kernel)."""
    if (KERNELS / f"{kernel}.cuh").exists():
        return includes(f"{kernel}.cuh")
    parts = sorted(path.relative_to(KERNELS).as_posix() for path in (KERNELS / kernel).glob("*.cuh"))
    if not parts:
        raise SystemExit(f"plant_bugs: kernels/ has no {kernel}")
    return list(dict.fromkeys(name for part in parts for name in includes(part)))


def end_of_call(text: str, open_bracket: int) -> int:
    depth = 0
    for at in range(open_bracket, len(text)):
        depth += {"(": 1, ")": -1}.get(text[at], 0)
        if depth == 0:
            return at + 1
    raise ValueError("a bracket is not closed")


def bugs_of(path: str) -> list[Bug]:
    text = (KERNELS / path).read_text()
    bugs = []
    for match in CALL.finditer(text):
        begin, end = match.start(), end_of_call(text, match.end() - 1)
        whole_line = text[text.rfind("\n", 0, begin) + 1 : text.find("\n", end)]
        if EXPLAINED in whole_line or whole_line.strip().startswith("//") or text[end : end + 1] != ";":
            continue
        line, call = text.count("\n", 0, begin) + 1, text[begin:end]

        def add(what: str, instead: str, at=(begin, end), line=line) -> None:
            bugs.append(Bug(path, line, what, text[: at[0]] + instead + text[at[1] :]))

        add(f"without {' '.join(call.split())}", "(void)0")
        if groups := GROUPS.search(call):
            later = f"{groups[1]}<{int(groups[2]) + 1}>"
            add(f"{later}, not {groups[0]}", call.replace(groups[0], later))
        if phase := PHASE.match(call):
            add(f"the other phase in {' '.join(call.split())}", f"ptx::mbarrier_wait({phase[1]} ^ 1)")
    return bugs


def slips_of(path: str) -> list[Bug]:
    text = (KERNELS / path).read_text()
    slips, begin = [], 0
    for number, line in enumerate(text.split("\n"), start=1):
        code = line.split("//")[0]
        for wrong, instead in SLIPS.items() if not NO_SLIP.match(line) else ():
            at = code.find(wrong)
            if at >= 0:
                changed = text[: begin + at] + instead + text[begin + at + len(wrong) :]
                slips.append(Bug(path, number, f"'{instead}' for '{wrong}' in {code.strip()}", changed))
        begin += len(line) + 1
    return slips


def tests_of(kernel: str) -> list[str]:
    """The files of emulated tests that the kernel goes through: its own, and those of its parts (sm90_wide)."""
    room, name = kernel.split("/")[:2]
    names = [name, *([name.split("_")[0]] if "_" in name else []), f"{room}_{name}"]
    folder = ROOT / "tests/kernels" / room
    for candidate in names:
        if (folder / f"{candidate}_emulated_test.cpp").exists():
            found = folder.glob(f"{candidate}_*_emulated_test.cpp")
            parts = [file.name.removesuffix("_emulated_test.cpp") for file in found]
            of_kernel = [part for part in parts if not (KERNELS / room / part).exists()]  # sm90_fp8 is another kernel
            return [f"kernels/{room}/{part}_emulated_test.cpp" for part in [candidate, *sorted(of_kernel)]]
    raise SystemExit(f"plant_bugs: tests/kernels/{room} has no emulated test for {kernel}")


def suites_of(test_file: str) -> list[str]:
    listing = subprocess.run(
        [PROGRAM, f"--file={test_file}", "--gtest_list_tests"], capture_output=True, text=True, check=True
    ).stdout
    return [line.split()[0] for line in listing.splitlines() if line and not line.startswith((" ", "Running"))]


def run(bug: Bug | None, suites: list[str], cases: list[str], quick: bool) -> str:
    """How the bug was found; empty where it was not. None: the kernels as they are."""
    with tempfile.TemporaryDirectory(prefix="planted_bug_") as folder:
        for part in ("kernels", "src/emulator/runtime"):  # the emulator's side of the wrappers is next to the kernels
            shutil.copytree(ROOT / part, Path(folder) / part)
        if bug:
            (Path(folder) / "kernels" / bug.path).write_text(bug.text)
        environment = {
            **os.environ,
            "FLASH_ATTENTION_KERNEL_DIR": f"{folder}/kernels",
            "FLASH_ATTENTION_CACHE_DIR": f"{folder}/cache",
        }
        telling = ":".join(f"{suite}*{name}*" for suite in suites for name in cases)
        everything = ":".join(f"{suite}*" for suite in suites)
        for tests in [telling] if quick else [telling, everything]:
            command = [PROGRAM, f"--gtest_filter={tests}", "--gtest_fail_fast", "--gtest_brief=1"]
            try:
                done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=LIMIT_S)
            except subprocess.TimeoutExpired:
                return f"{OVERDUE} after {LIMIT_S} s"
            if NOT_COMPILED in done.stdout:
                return "does not compile"
            if done.returncode != 0:
                failed = re.findall(r"^\[  FAILED  \] (\S+)", done.stdout, re.MULTILINE)
                return failed[0].rstrip(",") if failed else f"exit code {done.returncode}"
    return ""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kernel", nargs="?", help="a file below kernels/ without its ending, or a folder: forward/sm80")
    parser.add_argument("--list", action="store_true", help="print the bugs and plant none")
    parser.add_argument("--only", help="numbers of bugs, as --list prints them")
    parser.add_argument("--slips", type=int, default=0, help="plant so many slips, drawn at random")
    parser.add_argument("--seed", type=int, default=1, help="of that draw")
    parser.add_argument("--test", help="the file of tests, below tests/; found by the kernel's name if not given")
    parser.add_argument("--files", help="plant only in files whose name contains this")
    parser.add_argument("--quick", action="store_true", help="the telling cases alone")
    parser.add_argument("--cases", default=",".join(TELLING), help="the telling cases, by parts of their names")
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--meaning", choices=["all", *rooms()], help="plant the mistakes of a room instead")
    parser.add_argument("--dry", action="store_true", help="with --meaning: run the tests without the mistakes")
    options = parser.parse_args()
    only = {int(number) for number in options.only.split(",")} if options.only else set()
    if options.meaning:
        chosen_rooms = rooms() if options.meaning == "all" else [options.meaning]
        return 1 if sum(plant_room(room, only, options.list, options.dry) for room in chosen_rooms) else 0
    if not options.kernel:
        parser.error("which kernel?")

    files = [f for f in files_of(options.kernel) if (options.files or "") in f]
    if options.slips:
        slips = [slip for file in files for slip in slips_of(file)]
        chosen = random.Random(options.seed).sample(slips, min(options.slips, len(slips)))
    else:
        chosen = [bug for file in files for bug in bugs_of(file)]
    numbered = list(enumerate(chosen, start=1))
    if only:
        numbered = [entry for entry in numbered if entry[0] in only]
    if options.list:
        for number, bug in numbered:
            print(f"{number:4}  {bug.path}:{bug.line}  {bug.what}")
        return 0
    files = [options.test] if options.test else tests_of(options.kernel)
    suites, cases = [suite for file in files for suite in suites_of(file)], options.cases.split(",")
    if wrong := run(None, suites, cases, quick=True):  # else every bug would count as found
        raise SystemExit(f"plant_bugs: without a bug the tests fail, too: {wrong}")

    def one(entry: tuple[int, Bug]) -> tuple[int, Bug, str]:
        start = time.monotonic()
        number, bug = entry
        found = run(bug, suites, cases, options.quick)
        print(
            f"{number:4}  {time.monotonic() - start:5.0f} s  {bug.path}:{bug.line}  {bug.what}: {found or 'SURVIVED'}",
            flush=True,
        )
        return number, bug, found

    with ThreadPoolExecutor(options.jobs) as pool:
        tried = list(pool.map(one, numbered))
    survivors = [(number, bug) for number, bug, found in tried if not found or found.startswith(OVERDUE)]
    print(f"\n{options.kernel}: {len(numbered)} bugs planted, {len(numbered) - len(survivors)} found")
    for number, bug in survivors:
        print(f"survived {number}: kernels/{bug.path}:{bug.line}  {bug.what}")
    return 1 if survivors else 0


if __name__ == "__main__":
    sys.exit(main())
