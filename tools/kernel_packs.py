"""Packs of GPU kernels for the wheels: what most models ask for of a Hopper GPU, so that a first call compiles nothing.

Kernels that differ in a few options are alike: compressed together they take a seventh of what they take one by one. A pack
holds the cache files of one stem (src/jit/pack.h says how, and reads it).
"""

import lzma
import shutil
from pathlib import Path

import kernels_wheel

ARCH = "sm_90"
WORDS = ["--core"]  # of `flash-attention compile`


def content_of(files: list[Path]) -> bytes:
    """A line "NAME BYTES" for each file, an empty line, the files. The like ones are neighbours."""
    files = sorted(files, key=lambda file: (file.stat().st_size, file.name))
    index = "".join(f"{file.name} {file.stat().st_size}\n" for file in files)
    return index.encode() + b"\n" + b"".join(file.read_bytes() for file in files)


def write_packs(files: list[Path], folder: Path) -> list[Path]:
    """STEM.pack in the folder, which is made anew, for files STEM-CONTENT-COMPILER.cubin."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    stems: dict[str, list[Path]] = {}
    for file in files:
        stems.setdefault(file.stem.rsplit("-", 2)[0], []).append(file)
    packs = []
    for stem, found in sorted(stems.items()):
        packs.append(folder / f"{stem}.pack")
        packs[-1].write_bytes(lzma.compress(content_of(found), format=lzma.FORMAT_ALONE, preset=9 | lzma.PRESET_EXTREME))
    return packs


def make_packs(command: Path, folder: Path) -> list[Path]:
    """Compiles what the wheels carry, where it was not compiled before, and packs it. Needs NVRTC and no GPU."""
    return write_packs(kernels_wheel.compile_for(ARCH, command, WORDS), folder)
