"""The machine code of the kernels as text, to show that a rewrite of a source changes no instruction. Needs NVRTC, no GPU.

    python tools/machine_code.py list    --only backward/sm90      kernels of the compile tests, nothing is compiled
    python tools/machine_code.py record  --only backward/sm90      compiles them and puts their lines into the record
    python tools/machine_code.py compare --only backward/sm90      compiles them and compares them with the record

A kernel is found again by its place: the test that compiles it, the number of the plan in the test, the number of the
launch in the plan. Its unit and its configuration may be renamed. The kernels are those of the tree. After a change of
src/ or tests/ build the tests first: `tools/build.sh release kernels_compile_test`. The cache keeps what was compiled, so
a second run only compiles what has changed.
"""

import argparse
import hashlib
import os
import re
import struct
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
RECORD = ROOT / "tests" / "kernels" / "machine_code.txt"
# Tests left out unless --all is given: other architectures, pairs of options, kernels to learn from. They are many.
RARE = ("Archs.*", "BackwardSm90Compiles.LightOptions", "LadderCompile.*", "MicroCompiles.*", "*standard*", "*ladder*")
TRAILER = struct.Struct("<8sIIQQ32s")  # src/jit/entry.cpp


class Kernel(NamedTuple):
    place: str  # "Suite.Name#plan.launch"
    name: str  # "backward/sm90 sm_90a BackwardSm90Config{...}"
    seconds: str = ""  # of the compiler, on one core; 0: it was in the cache
    path: str = ""
    registers: str = ""
    spills: str = ""  # bytes stored and loaded by a thread
    warnings: str = ""  # of the assembler, about wgmma that it serialised

    def line(self, code: str) -> str:
        """The line of the record. A configuration is long, and may be renamed: it is left out."""
        return "\t".join(
            [
                self.place,
                code,
                self.registers,
                self.spills,
                self.warnings,
                f"{float(self.seconds):.1f}",
                self.name.split("{")[0],
            ]
        )


def machine_code(cubin: bytes) -> str:
    """A hash of the instructions and of the constants in memory, and one of the operations alone.

    Neither depends on names nor on the kernel's parameters. If only the second one stays, the compiler has chosen other
    registers for the same instructions in the same order.
    """
    assert cubin[:5] == b"\x7fELF\x02", "no 64-bit ELF"
    (table,) = struct.unpack_from("<Q", cubin, 40)
    entry_bytes, count, names_at = struct.unpack_from("<HHH", cubin, 58)
    sections = [struct.unpack_from("<IIQQQQ", cubin, table + i * entry_bytes) for i in range(count)]
    names = sections[names_at][4]
    everything, operations = hashlib.sha256(), hashlib.sha256()
    for name_at, kind, _, _, offset, size in sections:
        name = cubin[names + name_at : cubin.index(b"\0", names + name_at)].decode()
        content = cubin[offset : offset + size]
        # Bank 0 holds the kernel's parameters, bank 4 addresses of variables. Kind 8 takes no room in the file.
        if re.match(r"\.text\.|\.nv\.constant[1235-9]", name) and kind != 8:
            everything.update(struct.pack("<Q", size) + content)
        if name.startswith(".text."):  # an instruction has 16 bytes, of which the first 12 bits are the operation
            operations.update(bytes(part for i in range(0, size, 16) for part in (content[i], content[i + 1] & 15)))
    return f"{everything.hexdigest()[:16]}-{operations.hexdigest()[:8]}"


def compiler_of(entry: bytes) -> str:
    """The NVRTC that made a file of the cache."""
    _, _, _, payload, _, _ = TRAILER.unpack(entry[-TRAILER.size :])
    return entry[payload:].split(b"\n")[2].decode()


def run_tests(tests: str, only: str, program: Path, folder: Path) -> list[Kernel]:
    """What the compile tests say about their kernels; those that match `only` are compiled, and have a path."""
    record = Path(tempfile.mkstemp(dir=folder)[1])
    environment = os.environ | {
        "FLASH_ATTENTION_TEST_ALL": "1",  # a plan's number in its test is that of the whole list
        "FLASH_ATTENTION_RECORD": str(record),
        "FLASH_ATTENTION_RECORD_ONLY": only,
        "FLASH_ATTENTION_KERNEL_DIR": str(ROOT / "kernels"),
    }
    environment.setdefault("VIRTUAL_ENV", sys.prefix)  # where NVRTC is looked for
    done = subprocess.run(
        [program, f"--gtest_filter={tests}"], env=environment, capture_output=True, text=True, check=False
    )
    if "NVRTC, which compiles the GPU kernels, was not found" in done.stdout:
        sys.exit("NVRTC was not found: .venv/bin/python -m pip install -r tools/requirements/nvrtc.txt")
    return [Kernel(*line.split("\t")) for line in record.read_text().splitlines()]


def read_record(path: Path) -> tuple[str, dict[str, list[str]]]:
    """The compiler, and place -> the other columns."""
    lines = path.read_text().splitlines() if path.exists() else []
    compiler = lines[0].removeprefix("# ") if lines else ""
    return compiler, {line.split("\t")[0]: line.split("\t")[1:] for line in lines if not line.startswith("#")}


def merged(recorded: dict[str, list[str]], now: dict[str, list[str]], listed: set[str]) -> dict[str, list[str]]:
    """The record with the new lines, without places that the listed tests do not have any more."""
    tests = {place.split("#")[0] for place in listed}
    kept = {place: columns for place, columns in recorded.items() if place in listed or place.split("#")[0] not in tests}
    return kept | now


def report(recorded: dict[str, list[str]], now: dict[str, list[str]]) -> tuple[list[str], bool]:
    """Lines for people, and whether all that both have is equal."""
    changed, moved, unknown, equal = [], [], [], 0
    for place, new in sorted(now.items()):
        old = recorded.get(place)
        if old is None:
            unknown.append(f"not in the record: {place}  {new[5]}")
        elif old[0].split("-")[-1] == new[0].split("-")[-1] and old[0] != new[0]:
            moved.append(f"other registers: {place}  {new[5]}")
        elif old[0] != new[0]:
            words = zip(("registers", "spills", "wgmma warnings"), old[1:4], new[1:4], strict=True)
            changed.append(f"changed: {place}  {new[5]}  " + ", ".join(f"{word} {a} -> {b}" for word, a, b in words))
        else:
            equal += 1
    summary = f"{equal} equal, {len(moved)} in other registers, {len(changed)} changed, {len(unknown)} not in the record"
    return [*unknown, *moved, *changed, summary], not changed and not moved


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("verb", choices=("list", "record", "compare"))
    parser.add_argument("--only", default="", metavar="REGEX", help='of "UNIT [ENTRY] sm_90a Config{...}"')
    parser.add_argument("--test", default="", metavar="FILTER", help="of GoogleTest, as BackwardSm90Compiles.*")
    parser.add_argument("--all", action="store_true", help="also " + ", ".join(RARE))
    parser.add_argument("--jobs", type=int, default=1, help="tests at a time; each compiles two kernels at a time")
    parser.add_argument("--record", type=Path, default=RECORD)
    parser.add_argument("--program", type=Path, default=ROOT / "build/release/tests/kernels_compile_test")
    arguments = parser.parse_args()
    rare = () if arguments.all or arguments.test else RARE
    tests = (arguments.test or "*") + "-" + ":".join((*rare, "NvrtcTest.*", "Nvrtc/*", "Primer.*"))

    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        wanted = re.compile(arguments.only)
        listed = run_tests(tests, "^$", arguments.program, folder)
        kernels = [k for k in listed if wanted.search(k.name)]
        if arguments.verb == "list":
            print("\n".join(f"{kernel.place}  {kernel.name}" for kernel in kernels))
            return 0
        compilers, now, failed, seconds = set(), {}, [], {}
        by_test = sorted({kernel.place.split("#")[0] for kernel in kernels})
        with ThreadPoolExecutor(arguments.jobs) as pool:
            for done in pool.map(lambda test: run_tests(test, arguments.only, arguments.program, folder), by_test):
                for kernel in done:
                    if not wanted.search(kernel.name):
                        continue
                    if not kernel.path:
                        failed.append(f"does not compile: {kernel.place}  {kernel.name}")
                        continue
                    entry = Path(kernel.path).read_bytes()
                    compilers.add(compiler_of(entry))
                    place, *rest = kernel.line(machine_code(entry)).split("\t")
                    now[place] = rest
                    seconds[kernel.name] = float(kernel.seconds)

    compiler, recorded = read_record(arguments.record)
    print("\n".join(failed), end="\n" if failed else "")
    if len(compilers) > 1 or (compiler and compilers and compilers != {compiler}):
        sys.exit(f"the record is of {compiler}; this is {', '.join(sorted(compilers))}")
    if arguments.verb == "compare":
        lines, same = report(recorded, now)
        print("\n".join(lines))
        return 0 if same and not failed else 1
    for place, columns in now.items():
        before = recorded.get(place)
        if before and float(columns[4]) == 0:
            columns[4] = before[4]  # it came from the cache
    recorded = merged(recorded, now, {kernel.place for kernel in listed})
    header = [
        f"# {compiler or compilers.pop()}",
        "# place, machine code, registers, spilled bytes, wgmma warnings, seconds, kernel",
    ]
    lines = ["\t".join([place, *columns]) for place, columns in sorted(recorded.items())]
    arguments.record.write_text("\n".join([*header, *lines]) + "\n")
    print(f"{len(now)} of {len(lines)} lines are new or the same; the compiler took {sum(seconds.values()):.0f} s")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
