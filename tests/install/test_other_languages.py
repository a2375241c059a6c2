"""Programs that others build by hand: Rust and an operator of ONNX Runtime by the C ABI, and the primer with nvcc."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


def run(*words: object, **settings: object) -> str:
    done = subprocess.run([str(word) for word in words], capture_output=True, text=True, timeout=600, **settings)
    assert done.returncode == 0, f"{words}\n{done.stdout}\n{done.stderr}"
    return done.stdout


@pytest.mark.skipif(not shutil.which("cargo"), reason="no cargo here")
def test_rust(tmp_path):
    environment = {
        **os.environ,
        "FLASH_ATTENTION_LIB_DIR": str(ROOT / "build" / "release"),
        "CARGO_TARGET_DIR": str(tmp_path),
    }
    manifest = ROOT / "examples" / "rust" / "Cargo.toml"
    shutil.copytree(manifest.parent, tmp_path / "rust")  # cargo writes a lock file beside the manifest
    text = run("cargo", "run", "--quiet", "--offline", "--manifest-path", tmp_path / "rust" / "Cargo.toml", env=environment)
    version = (ROOT / "VERSION").read_text().strip()
    assert f"flash_attention {version}: out = 0.000 1.000 ... 63.000" in text
    assert "refused: head_dim" in text


@pytest.mark.skipif("ONNXRUNTIME_INCLUDE_DIR" not in os.environ, reason="ONNXRUNTIME_INCLUDE_DIR names no headers")
def test_onnxruntime(tmp_path):
    """With the headers of ONNX Runtime; ONNXRUNTIME_PYTHON is a Python that has onnxruntime and onnx (else this one)."""
    library, build = tmp_path / "libattention_op.so", ROOT / "build" / "release"
    source = ROOT / "examples" / "onnxruntime" / "attention_op.c"
    includes = [f"-I{folder}" for folder in (os.environ["ONNXRUNTIME_INCLUDE_DIR"], ROOT / "include", build / "include")]
    flags = ["-std=c11", "-O2", "-Wall", "-Wextra", "-Werror", "-shared", "-fPIC", f"-L{build}", f"-Wl,-rpath,{build}"]
    run("gcc", source, *includes, *flags, "-lflash_attention", "-o", library)
    python = os.environ.get("ONNXRUNTIME_PYTHON", sys.executable)
    assert "right, onnxruntime" in run(python, Path(__file__).parent / "onnx_attention.py", library)


@pytest.mark.long_tail
@pytest.mark.skipif(not shutil.which("nvcc"), reason="no nvcc here")
def test_the_primer_with_nvcc(tmp_path):
    run("make", "-C", ROOT / "kernels" / "primer", f"OUT={tmp_path}")
    assert {path.name for path in tmp_path.iterdir()} == {"vector_add", "vector_add_simple", "matrix_add"}
