"""The library as a user gets it: installed, found by CMake and by pkg-config, and used by the examples in C++ and in C."""

import os
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
BUILD = ROOT / "build" / "release"
EXAMPLES = sorted(path for path in (ROOT / "examples").iterdir() if path.suffix in (".c", ".cpp"))


def run(*words: object, **settings: object) -> str:
    done = subprocess.run([str(w) for w in words], capture_output=True, text=True, timeout=300, **settings)
    assert done.returncode == 0, f"{words}\n{done.stdout}\n{done.stderr}"
    return done.stdout


@pytest.fixture(scope="module")
def prefix(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("installed")
    run("cmake", "--install", BUILD, "--prefix", folder)
    return folder


@pytest.fixture(scope="module")
def built_with_cmake(prefix, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("examples")
    run("cmake", "-S", ROOT / "examples", "-B", folder, "-G", "Ninja", f"-DCMAKE_PREFIX_PATH={prefix}")
    run("cmake", "--build", folder)
    return folder


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.name)
def test_example_with_find_package(built_with_cmake, example):
    assert run(built_with_cmake / example.name.replace(".", "_"))


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.name)
def test_example_with_pkg_config(prefix, tmp_path, example):
    library = next(prefix.rglob("libflash_attention.so")).parent
    environment = {**os.environ, "PKG_CONFIG_PATH": str(library / "pkgconfig"), "LD_LIBRARY_PATH": str(library)}
    flags = run("pkg-config", "--cflags", "--libs", "flash_attention", env=environment).split()
    compiler = ["g++", "-std=c++20"] if example.suffix == ".cpp" else ["gcc", "-std=c11"]
    run(*compiler, "-Wall", "-Wextra", "-Werror", example, "-o", tmp_path / "program", *flags)
    assert run(tmp_path / "program", env=environment)


def shown(page: str, language: str) -> str:
    return (ROOT / page).read_text().split(f"```{language}\n")[1].split("```")[0]


@pytest.mark.parametrize("page", ["README.md", "docs/guides/cpp.md"])
def test_the_example_of_a_page_compiles_by_the_lines_of_the_readme(prefix, tmp_path, page):
    (library,) = (path.parent for path in prefix.rglob("libflash_attention.so"))
    assert library.name == "lib"  # as the lines say
    (tmp_path / "home").mkdir()
    (tmp_path / "home" / ".local").symlink_to(prefix)
    (tmp_path / "example.cpp").write_text(shown(page, "cpp"))
    run("sh", "-ec", shown("README.md", "sh"), cwd=tmp_path, env={**os.environ, "HOME": str(tmp_path / "home")})


def test_an_older_standard_is_told_which_one_to_name(prefix, tmp_path):
    (tmp_path / "example.cpp").write_text(shown("README.md", "cpp"))
    words = ["g++", "-std=c++17", "-fsyntax-only", f"-I{prefix}/include", tmp_path / "example.cpp"]
    done = subprocess.run(words, capture_output=True, text=True)
    first = next(line for line in done.stderr.splitlines() if "error:" in line)
    assert "C++ headers need C++20: compile with -std=c++20" in first
    (tmp_path / "c.cpp").write_text("#include <flash_attention/c_api.h>\nint main() {}\n")
    run("g++", "-std=c++11", "-fsyntax-only", f"-I{prefix}/include", tmp_path / "c.cpp")


def test_there_are_examples_in_both_languages():
    assert {path.suffix for path in EXAMPLES} == {".c", ".cpp"}


def test_the_installed_command_runs(prefix):
    version = (ROOT / "VERSION").read_text().strip()
    assert run(prefix / "bin" / "flash-attention", "--version").strip() == version
    assert run("grep", "-h", "^Version:", next(prefix.rglob("flash_attention.pc"))).split()[1] == version


def test_the_library_exports_the_public_api_alone(prefix):
    library = next(prefix.rglob("libflash_attention.so"))
    symbols = run("nm", "-D", "--defined-only", "-C", library).splitlines()
    names = [line.split(maxsplit=2)[2] for line in symbols if line.split()[1] in "TDBR"]
    foreign = [n for n in names if "flash_attention" not in n]
    assert names and not foreign, f"not ours: {foreign[:10]}"


def test_every_public_header_compiles_alone(prefix, tmp_path):
    for header in sorted((prefix / "include" / "flash_attention").glob("*.h")):
        source = tmp_path / "alone.cpp"
        source.write_text(f"#include <flash_attention/{header.name}>\nint main() {{}}\n")
        run("g++", "-std=c++20", "-fsyntax-only", "-Wall", "-Wextra", "-Werror", f"-I{prefix / 'include'}", source)
