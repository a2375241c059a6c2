"""The versions of system libraries that a shared object asks for."""

import platform
import re
import subprocess
from pathlib import Path


def tool_for(machine: str) -> str:
    """objdump; Debian's cross tools have names of their own."""
    return "objdump" if machine == platform.machine() else f"{machine}-linux-gnu-objdump"


def newest(library: Path, machine: str = platform.machine()) -> dict[str, tuple[int, ...]]:
    """{"GLIBC": (2, 27), ...}: the newest version of each family among the symbols that others must define."""
    table = subprocess.run([tool_for(machine), "-T", str(library)], capture_output=True, text=True, check=True).stdout
    found: dict[str, tuple[int, ...]] = {}
    for family, version in re.findall(r"\*UND\*.*\b(GLIBC|GLIBCXX|CXXABI|GCC)_([0-9.]+)", table):
        numbers = tuple(int(part) for part in version.split("."))
        found[family] = max(found.get(family, ()), numbers)
    return found
