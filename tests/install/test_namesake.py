"""A package index has another project with this import name: beside it the import warns, and doctor() says what to type."""

import base64
import hashlib
import importlib.metadata
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import flash_attention
import pytest

ROOT = Path(__file__).resolve().parents[2]
DOCTOR = "import flash_attention; print([f for f in flash_attention.doctor() if f['subject'] == 'installation'])"


def write_wheel(folder: Path, distribution: str, version: str, files: dict[str, str]) -> Path:
    """A wheel of these files."""
    info = f"{distribution}-{version}.dist-info"
    contents = files | {
        f"{info}/METADATA": f"Metadata-Version: 2.1\nName: {distribution}\nVersion: {version}\n",
        f"{info}/WHEEL": "Wheel-Version: 1.0\nGenerator: a test\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    hashes = {
        name: base64.urlsafe_b64encode(hashlib.sha256(text.encode()).digest()).rstrip(b"=").decode()
        for name, text in contents.items()
    }
    rows = [f"{name},sha256={hashes[name]},{len(text.encode())}" for name, text in contents.items()]
    contents[f"{info}/RECORD"] = "\n".join([*rows, f"{info}/RECORD,,", ""])
    path = folder / f"{distribution}-{version}-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as wheel:
        for name, text in contents.items():
            wheel.writestr(name, text)
    return path


@pytest.fixture
def environment(tmp_path) -> Path:
    """The Python of an environment with this package alone, as pip leaves it."""
    folder = tmp_path / "environment"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder], check=True)
    (site,) = folder.glob("lib/python*/site-packages")
    package = Path(flash_attention.__file__).parent
    shutil.copytree(package, site / "flash_attention")
    (info,) = package.parent.glob("exact_attention-*.dist-info")
    shutil.copytree(info, site / info.name)
    return folder / "bin" / "python"


def install(python: Path, wheel: Path) -> None:
    words = [sys.executable, "-m", "pip", "--python", python, "install", "--quiet", "--no-index", "--no-deps", wheel]
    done = subprocess.run(words, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def run(python: Path, program: str) -> subprocess.CompletedProcess:
    return subprocess.run([python, "-I", "-c", program], capture_output=True, text=True)


def test_the_import_warns_of_the_namesake(environment, tmp_path):
    alone = run(environment, DOCTOR)
    assert (alone.stdout, alone.stderr) == ("[]\n", "")
    install(environment, write_wheel(tmp_path, "flash_attention", "1.0.0", {"flash_attention/other.py": ""}))
    beside = run(environment, DOCTOR)
    assert "UserWarning: flash_attention-1.0.0 in " in beside.stderr and "is another project" in beside.stderr
    advice = "pip uninstall flash_attention exact-attention, then install exact-attention again"
    assert advice in beside.stderr and advice in beside.stdout


def test_doctor_finds_any_other_owner_and_nobody_else(environment, tmp_path):
    install(environment, write_wheel(tmp_path, "nothing_of_ours", "1.0", {"flash_attention_more/a.py": ""}))
    install(environment, write_wheel(tmp_path, "mixed", "2.0", {"mixed/a.py": "", "flash_attention/b.py": ""}))
    found = run(environment, DOCTOR)
    assert found.stderr == "" and "'detail': 'mixed: other projects with files of this package'" in found.stdout


def test_the_distribution_is_ours():
    assert importlib.metadata.version("exact-attention") == flash_attention.__version__


def test_no_text_tells_people_to_install_the_namesake():
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True)
    if listed.returncode:
        pytest.skip("not a git checkout")
    wrong = re.compile(r"pip3? install(?: +-\S+)* +[\"']?flash[-_]attention\b(?!/)")
    found = []
    for name in listed.stdout.splitlines():
        path = ROOT / name
        if path.is_file() and path.suffix in {".md", ".py", ".cpp", ".h", ".sh", ".toml", ".yml", ".txt", ".in", ""}:
            found += [f"{name}: {line}" for line in path.read_text(errors="replace").splitlines() if wrong.search(line)]
    assert found == []
