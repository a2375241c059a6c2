"""Compiles GPU kernels ahead of time and packs them into a wheel; `make kernels-wheel` calls it.

`flash-attention compile --common` says which kernels; NVRTC compiles them, and no GPU is needed. The library looks into
the package by itself, before it looks for NVRTC: a kernel is found by a hash of its sources and options, so a package of
another version is never wrong, only of no use. What was compiled before is in build/kernels and is not compiled again.
"""

import argparse
import base64
import hashlib
import json
import os
import subprocess
import zipfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
NAME = "flash_attention_kernels"  # the folder that the library looks for
DISTRIBUTION = "exact_attention_kernels"
ARCHS = ("sm_80", "sm_90", "sm_100", "sm_120")
LIMIT_BYTES = 60_000_000
INIT = '"""GPU kernels of flash_attention, compiled ahead of time: found by the library, not to be imported."""\n'


def compile_for(arch: str, command: Path, words: list[str]) -> list[Path]:
    """The files of the kernels, in build/kernels."""
    folder = ROOT / "build" / "kernels" / arch
    settings = {
        "FLASH_ATTENTION_CACHE_DIR": str(folder),
        "FLASH_ATTENTION_CACHE_LIMIT": "8G",
        "FLASH_ATTENTION_AOT_DIR": str(folder / "none"),  # or kernels that are packed already would be taken from there
    }
    asked = [str(command), "compile", "--device", "cuda", "--arch", arch, "--json", *words]
    done = subprocess.run(asked, capture_output=True, text=True, env={**os.environ, **settings})
    if done.returncode:
        raise SystemExit(f"kernels: {' '.join(asked)}\n{done.stdout[-2000:]}{done.stderr}")
    return sorted({Path(kernel["path"]) for kernel in json.loads(done.stdout)})


def write_wheel(files: list[Path], version: str, output: Path) -> Path:
    """A wheel of these files. It holds no program for this machine's processor, so it serves every platform."""
    info = f"{DISTRIBUTION}-{version}.dist-info"
    contents: dict[str, bytes] = {f"{NAME}/__init__.py": INIT.encode()}
    contents |= {f"{NAME}/{file.name}": file.read_bytes() for file in files}
    contents[f"{info}/licenses/LICENSE"] = (ROOT / "LICENSE").read_bytes()
    contents[f"{info}/METADATA"] = (
        f"Metadata-Version: 2.4\nName: {DISTRIBUTION.replace('_', '-')}\nVersion: {version}\nSummary: GPU kernels of "
        "flash_attention, compiled ahead of time\nLicense-Expression: MIT\nLicense-File: LICENSE\nRequires-Python: >=3.10\n"
    ).encode()
    contents[f"{info}/WHEEL"] = (
        b"Wheel-Version: 1.0\nGenerator: tools/kernels_wheel.py\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
    )
    rows = [f"{name},sha256={digest(data)},{len(data)}" for name, data in contents.items()]
    contents[f"{info}/RECORD"] = "\n".join([*rows, f"{info}/RECORD,,", ""]).encode()
    path = output / f"{DISTRIBUTION}-{version}-py3-none-any.whl"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED, compresslevel=9) as wheel:
        for name, data in contents.items():
            entry = zipfile.ZipInfo(name)  # with a fixed date, so that the same kernels give the same file
            entry.external_attr = 0o100644 << 16
            entry.compress_type = zipfile.ZIP_DEFLATED
            wheel.writestr(entry, data)
    return path


def digest(data: bytes) -> str:
    return base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--command", type=Path, default=ROOT / "build" / "release" / "flash-attention")
    parser.add_argument("--output", type=Path, default=ROOT / "dist")
    parser.add_argument("--arch", action="append", help=f"may be repeated; default: {' '.join(ARCHS)}")
    parser.add_argument("problem", nargs="*", help="flags of `flash-attention compile` after --; default: --common")
    arguments = parser.parse_args()
    words = arguments.problem or ["--common"]
    with ThreadPoolExecutor(max_workers=2) as pool:
        found = list(pool.map(lambda arch: compile_for(arch, arguments.command, words), arguments.arch or ARCHS))
    arguments.output.mkdir(parents=True, exist_ok=True)
    version = (ROOT / "VERSION").read_text().strip()
    wheel = write_wheel([file for files in found for file in files], version, arguments.output)
    size = wheel.stat().st_size
    print(f"{size / 1e6:6.2f} MB  {wheel.name}  {sum(map(len, found))} kernels")
    if size > LIMIT_BYTES:
        raise SystemExit(f"kernels: {wheel.name} has {size} bytes, allowed: {LIMIT_BYTES}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
