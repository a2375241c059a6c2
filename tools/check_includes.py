"""Checks who includes whom: data goes through the house in one direction (docs/house.md), and this is the table of it."""

import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent

# room -> rooms it may include in addition to itself. Every room of the library may include the public headers, `include`.
ALLOWED = {
    "include": set(),
    "src/support": {"include"},
    "src/program": {"include", "kernels/abi", "src/support"},
    "src/plan": {"include", "kernels/abi", "src/program", "src/support"},
    "src/launch": {"include", "kernels/abi", "src/plan", "src/program", "src/support"},
    "src/backend": {"include"},
    "src/jit": {"include", "src/plan", "src/support"},
    "src/cuda": {"include", "kernels/abi", "src/backend", "src/jit", "src/launch", "src/plan", "src/support"},
    "src/cpu": {"include", "src/backend", "src/launch", "src/plan", "src/program", "src/support"},
    "src/emulator": {
        "include",
        "kernels/abi",
        "src/backend",
        "src/jit",
        "src/launch",
        "src/plan",
        "src/support",
        "kernels",
        "kernels/ptx",
        "kernels/tile",
    },
    "src/tuning": {"include", "src/backend", "src/plan", "src/support"},
    "src/check": {"include", "src/program", "src/support"},
    "src/api": {
        "include",
        "src/backend",
        "src/check",
        "src/launch",
        "src/plan",
        "src/program",
        "src/jit",
        "src/cuda",
        "src/cpu",
        "src/emulator",
        "src/support",
        "src/tuning",
    },
    "kernels/abi": set(),
    "kernels/ptx": {"kernels/abi"},
    "kernels/tile": {"kernels/abi", "kernels/ptx"},
    "kernels": {"kernels/abi", "kernels/ptx", "kernels/tile"},  # forward, backward, decode, ladder, primer
    "cli": {"include"},
    "python": {"include"},
    "examples": {"include"},
}

# Single files that a room may include although their room is not on its list.
ALLOWED_FILES = {
    "cli": {
        "src/api/checks/validate.h",
        "src/api/option_table.h",
        "src/api/plain_kernel.h",
        "src/check/program_score.h",
        "src/check/reference.h",
        "src/cpu/peaks.h",
        "src/cuda/memory.h",
        "src/emulator/checks/counters.h",
        "src/emulator/host/seed.h",
        "src/emulator/trace/timeline.h",
        "src/jit/embedded.h",
        "src/support/json.h",
        "src/support/json_value.h",
    },
    "python": {"src/api/option_table.h"},
    "src/tuning": {"src/api/option_table.h"},
}

INCLUDE = re.compile(r'^\s*#\s*include\s*"([^"]+)"', re.MULTILINE)
STANDARD = re.compile(r"^\s*#\s*include\s*<([^>]+)>", re.MULTILINE)
ALGORITHM = re.compile(
    r"\bstd::(?:(?:any|all|none)_of|clamp|copy_n|count_if|find(?:_if(?:_not)?)?|(?:stable_|partial_|is_)?sort(?:ed)?|(?:lower|upper)_bound|"
    r"(?:min|max|minmax)_element|nth_element|remove_if|reverse|rotate|shuffle|unique|ranges::\w+)\b"
)
SOURCES = {".h", ".hpp", ".cpp", ".c", ".cu", ".cuh"}


def room_of(path: str) -> str | None:
    """The longest room that holds the path."""
    held = [room for room in ALLOWED if path.startswith(room + "/")]
    return max(held, key=len) if held else None


def resolve(including: Path, text: str) -> str | None:
    """The included file, relative to the root; None where it is none of ours (or made by the build)."""
    for base in (including.parent, ROOT / "include", ROOT / "src", ROOT / "kernels", ROOT):
        candidate = (base / text).resolve()
        if candidate.is_file() and candidate.is_relative_to(ROOT):
            return candidate.relative_to(ROOT).as_posix()
    return None


def wrong_edges() -> list[str]:
    wrong = []
    for top in sorted({room.split("/")[0] for room in ALLOWED}):
        for file in sorted((ROOT / top).rglob("*")):
            if file.suffix not in SOURCES:
                continue
            source = file.relative_to(ROOT).as_posix()
            room = room_of(source)
            if room is None:
                wrong.append(f"{source}: lies in no room; the rooms are {', '.join(sorted(ALLOWED))}")
                continue
            for text in INCLUDE.findall(file.read_text(encoding="utf-8")):
                target = resolve(file, text)
                target_room = room_of(target) if target else None
                if target_room in (None, room) or target_room in ALLOWED[room] or target in ALLOWED_FILES.get(room, ()):
                    continue
                allowed = ", ".join(sorted(ALLOWED[room])) or "nothing"
                wrong.append(f"{source}: includes {target}; {room} may include itself and {allowed}")
    return wrong


def reached_headers(file: Path, seen: set[Path]) -> set[str]:
    """The standard headers that a file includes, itself or through ours."""
    if file in seen:
        return set()
    seen.add(file)
    text = file.read_text(encoding="utf-8")
    headers = set(STANDARD.findall(text))
    for name in INCLUDE.findall(text):
        if (target := resolve(file, name)) is not None:
            headers |= reached_headers(ROOT / target, seen)
    return headers


def without_algorithm() -> list[str]:
    """Files that name an algorithm without its header, which older standard libraries bring with other headers."""
    return [
        f"{file.relative_to(ROOT).as_posix()}: names {found.group()} without #include <algorithm>"
        for top in ("include", "src", "cli", "python", "tests")
        for file in sorted((ROOT / top).rglob("*"))
        if file.suffix in SOURCES
        and (found := ALGORITHM.search(file.read_text(encoding="utf-8")))
        and "algorithm" not in reached_headers(file, set())
    ]


if __name__ == "__main__":
    problems = wrong_edges() + without_algorithm()
    print("\n".join(problems), end="\n" if problems else "")
    sys.exit(1 if problems else 0)
