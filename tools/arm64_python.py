"""A Python for 64-bit Arm on a machine that is none: Debian's packages, unpacked into a folder and run under QEMU.

Nothing is installed and nothing needs root: apt keeps its state in that folder, and asks the sources that it has here.
Where something is missing, `make` says what: Unavailable.
"""

import os
import re
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

EMULATORS = ("qemu-aarch64-static", "qemu-aarch64")
KEYS = Path("/usr/share/keyrings/debian-archive-keyring.gpg")
NEEDED = ("apt-get", "apt-cache", "dpkg-deb")
WHEEL_PLATFORMS = [f"manylinux_2_{minor}_aarch64" for minor in (17, 27, 28)] + ["manylinux2014_aarch64"]


class Unavailable(Exception):
    """What is missing."""


@dataclass(frozen=True)
class Python:
    emulator: str
    root: Path
    version: str  # "3.11"

    def run(self, program: str, *paths: Path, cpu: str = "max", **environment: str) -> str:
        """What the program prints, with packages from `paths`, on that model of a processor."""
        python = self.root / "usr" / "bin" / f"python{self.version}"
        done = subprocess.run(
            [self.emulator, "-cpu", cpu, "-L", self.root, python, "-c", program],
            capture_output=True,
            text=True,
            timeout=900,
            env={"PATH": "", "HOME": str(self.root), "PYTHONPATH": os.pathsep.join(map(str, paths)), **environment},
        )
        if done.returncode:
            raise AssertionError(f"{python}, -cpu {cpu}: exit status {done.returncode}\n{done.stdout}{done.stderr}")
        return done.stdout


def find_emulator() -> str:
    found = next((path for name in EMULATORS if (path := shutil.which(name))), None)
    if found is None:
        raise Unavailable(f"no {EMULATORS[0]} here (Debian's qemu-user-static)")
    return found


def call(*words: object, **settings: object) -> str:
    done = subprocess.run([str(word) for word in words], capture_output=True, text=True, timeout=900, **settings)
    if done.returncode:
        raise Unavailable(f"{words[0]}: {(done.stdout + done.stderr)[-300:]}")
    return done.stdout


def source_of(suite: str) -> str:
    """A line for apt's list: the suite, from where Debian's packages come from here."""
    form = "$(REPO_URI)|$(LABEL)|$(COMPONENT)"
    key = f"[signed-by={KEYS}] " if KEYS.exists() else ""
    for line in call("apt-get", "indextargets", "--format", form, "Created-By: Packages").splitlines():
        place, label, component = line.split("|")
        if label == "Debian" and component == "main":
            return f"deb {key}{place} {suite} main\n"
    raise Unavailable("apt has no source of Debian's packages here")


def make(folder: Path, suite: str | None = None) -> Python:
    """Of that suite of Debian; None: of the system that is here. Made once in a folder."""
    emulator = find_emulator()
    for command in NEEDED:
        if shutil.which(command) is None:
            raise Unavailable(f"no {command} here")
    root, done = folder / "root", folder / "version"
    if not done.exists():
        shutil.rmtree(folder, ignore_errors=True)
        for part in ("state/lists/partial", "cache/archives/partial", "root"):
            (folder / part).mkdir(parents=True)
        (folder / "state" / "status").touch()  # as if nothing were installed
        settings = {
            "APT::Architecture": "arm64",
            "APT::Architectures": "arm64",
            "APT::Install-Recommends": "false",
            "Acquire::Languages": "none",
            "APT::Sandbox::User": "",
            "Dir::State": folder / "state",
            "Dir::State::status": folder / "state" / "status",
            "Dir::Cache": folder / "cache",
        }
        if suite is not None:
            (folder / "sources.list").write_text(source_of(suite))
            settings |= {"Dir::Etc::sourcelist": folder / "sources.list", "Dir::Etc::sourceparts": "/dev/null"}
        configuration = folder / "apt.conf"
        configuration.write_text("".join(f'{name} "{value}";\n' for name, value in settings.items()))
        environment = {**os.environ, "APT_CONFIG": str(configuration)}
        call("apt-get", "update", "-qq", env=environment)
        # NumPy asks for the C++ library; ours does not.
        call("apt-get", "install", "-qq", "-y", "--download-only", "python3", "libstdc++6", env=environment)
        for package in sorted((folder / "cache" / "archives").glob("*.deb")):
            call("dpkg-deb", "-x", package, root)
        (link,) = [path for path in (root / "usr" / "bin").glob("python3.*") if re.fullmatch(r"python3\.\d+", path.name)]
        done.write_text(link.name.removeprefix("python"))
    return Python(emulator, root, done.read_text())


def fetch(package: str, python: Python, folder: Path) -> Path:
    """The package's wheel for that Python, unpacked into a folder to import from; without what it needs."""
    platforms = [word for name in WHEEL_PLATFORMS for word in ("--platform", name)]
    words = ["--quiet", "--no-deps", "--only-binary", ":all:", "--python-version", python.version, *platforms]
    call("python3", "-m", "pip", "download", *words, "--dest", folder / "wheels", package)
    (wheel,) = (folder / "wheels").glob(f"{package}-*.whl")
    shutil.unpack_archive(wheel, folder / package, "zip")
    return folder / package
