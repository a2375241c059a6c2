"""The tarball and the Debian package: what is in them, and that it runs from where it was unpacked."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
BUILD = ROOT / "build" / "release"
EXPECTED = (
    "bin/flash-attention",
    "include/flash_attention/attention.h",
    "include/flash_attention/c_api.h",
    "include/flash_attention/version.h",
    "lib/cmake/flash_attention/flash_attentionConfig.cmake",
    "lib/pkgconfig/flash_attention.pc",
    "lib/libflash_attention.so",
    "share/man/man1/flash-attention.1",
    "share/bash-completion/completions/flash-attention",
    "share/zsh/site-functions/_flash-attention",
    "share/doc/flash-attention/copyright",
)


def run(*words: object, **settings: object) -> str:
    done = subprocess.run([str(word) for word in words], capture_output=True, text=True, timeout=600, **settings)
    assert done.returncode == 0, f"{words}\n{done.stdout}\n{done.stderr}"
    return done.stdout


def pack(generator: str, folder: Path) -> Path:
    run("cpack", "--config", BUILD / "CPackConfig.cmake", "-G", generator, "-B", folder)
    (package,) = (path for path in folder.iterdir() if path.is_file() and path.suffix in (".gz", ".deb"))
    return package


def works(prefix: Path, tmp_path: Path) -> None:
    """The command runs, and a program in C finds the library by pkg-config."""
    version = (ROOT / "VERSION").read_text().strip()
    assert run(prefix / "bin" / "flash-attention", "--version").strip() == version
    environment = {
        **os.environ,
        "PKG_CONFIG_PATH": str(prefix / "lib" / "pkgconfig"),
        "LD_LIBRARY_PATH": str(prefix / "lib"),
        "PKG_CONFIG_ALLOW_SYSTEM_CFLAGS": "1",
    }
    flags = run("pkg-config", "--cflags", "--libs", "flash_attention", env=environment).split()
    assert f"{prefix}/" in os.path.normpath(flags[0][2:]) + "/"
    run("gcc", "-std=c11", ROOT / "examples" / "forward.c", "-o", tmp_path / "program", *flags)
    assert run(tmp_path / "program", env=environment)


def test_tarball(tmp_path):
    package = pack("TGZ", tmp_path / "packed")
    run("tar", "-xzf", package, "-C", tmp_path)
    prefix = tmp_path / package.name.removesuffix(".tar.gz")
    assert [name for name in EXPECTED if not (prefix / name).exists()] == []
    works(prefix, tmp_path)


@pytest.mark.skipif(not shutil.which("dpkg-deb"), reason="no dpkg here")
def test_debian_package(tmp_path):
    package = pack("DEB", tmp_path / "packed")
    facts = run("dpkg-deb", "--field", package)
    assert "Package: flash-attention\n" in facts
    assert "libc6 (>=" in facts and "libstdc++6" in facts  # what it needs was looked up, not guessed
    assert "cuda" not in facts and "torch" not in facts
    assert "ldconfig" in run("dpkg-deb", "--info", package, "triggers")
    run("dpkg-deb", "--extract", package, tmp_path / "root")
    prefix = tmp_path / "root" / "usr"
    assert [name for name in EXPECTED if not (prefix / name).exists()] == []
    works(prefix, tmp_path)
