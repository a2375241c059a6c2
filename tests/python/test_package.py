"""The package as a whole: what importing loads, the verbs, the stubs."""

import inspect
import json
import subprocess
import sys
from importlib import resources

import flash_attention
import pytest


def test_import_loads_no_tensor_library():
    text = "import sys, flash_attention; print([m for m in ('torch', 'numpy', 'jax') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", text], capture_output=True, text=True, timeout=300)
    assert done.stdout.strip() == "[]", done.stderr


def test_every_public_name_exists():
    for name in flash_attention.__all__:
        if name != "jax":
            assert getattr(flash_attention, name) is not None


def test_what_can_be_imported_is_listed():
    """`from flash_attention import *` and the reference have every function that is there."""
    assert set(flash_attention._LAZY) | set(flash_attention._SUBMODULES) <= set(flash_attention.__all__)


def test_public_functions_are_documented():
    for name in flash_attention.__all__:
        value = None if name == "jax" else getattr(flash_attention, name)
        if inspect.isfunction(value) or inspect.isclass(value):
            assert inspect.getdoc(value), name


def test_typed_and_stubbed():
    files = {file.name for file in resources.files("flash_attention").iterdir()}
    assert {"py.typed", "_core.pyi"} <= files
    public = (resources.files("flash_attention") / "__init__.pyi").read_text()
    for name in flash_attention.__all__:
        assert name in public, f"{name} is missing from __init__.pyi"
    stub = (resources.files("flash_attention") / "_core.pyi").read_text()
    from flash_attention import _core

    for name in dir(_core):
        if not name.startswith("_") and name != "jax_targets":
            assert name in stub, f"{name} is missing from _core.pyi"


def test_doctor(warm_python, tmp_path):
    findings = flash_attention.doctor()
    assert {"subject", "ok", "detail", "advice"} == set(findings[0])
    assert flash_attention.devices()[0]["device"] == "cpu"
    done = warm_python("-m", "flash_attention", "doctor", "--json", FLASH_ATTENTION_CACHE_DIR=str(tmp_path))
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["findings"]


def test_a_lazy_import_keeps_its_cause(warm_python):
    """As where torch lacks a name that a part of the package needs: Python says no more than "cannot import name"."""
    text = "import torch; del torch.bfloat16; from flash_attention import flex_attention"
    done = warm_python("-c", text)
    assert "ImportError: flash_attention.flex cannot be imported: module 'torch' has no attribute 'bfloat16'" in done.stderr
    assert "direct cause" in done.stderr


def test_doctor_tells_of_a_torch_without_flex(warm_python):
    text = (
        "import torch, flash_attention; del torch.bfloat16; "
        "print(*(f for f in flash_attention.doctor() if f['subject'] == 'torch'))"
    )
    done = warm_python("-c", text)
    assert "'ok': False" in done.stdout and "flash_attention.flex cannot be imported" in done.stdout, done.stderr


def test_verbs(warm_python):
    done = warm_python("-m", "flash_attention", "--help")
    assert done.returncode == 0
    assert all(verb in done.stdout for verb in ("doctor", "compile", "bench", "report"))
    assert "_problem" not in done.stdout
    assert warm_python("-m", "flash_attention", "nothing").returncode == 2
    sizes = ("--seq-q", "64", "--heads", "4", "--kv-heads", "2", "--head-dim", "32")
    shape = ("--device", "cpu", "--dtype", "float32", *sizes)
    done = warm_python("-m", "flash_attention", "compile", *shape)
    assert done.returncode == 0, done.stderr
    assert "cpu/" in done.stdout
    done = warm_python("-m", "flash_attention", "bench", "--json", "--seconds", "0.01", "--backward", "--causal", *shape)
    assert done.returncode == 0, done.stderr
    assert set(json.loads(done.stdout)["times"]) == {"flash_attention", "torch", "standard"}


def test_what_a_verb_cannot_do_is_one_line(warm_python):
    hidden = "import sys; sys.modules['torch'] = None; from flash_attention.__main__ import main; sys.exit(main(['bench']))"
    for words, message in (
        (("-m", "flash_attention", "compile", "--device", "cpu", "--head-dim", "600"), "compile: head_dim: got 600"),
        (("-c", hidden), "bench: import of torch halted"),
    ):
        done = warm_python(*words)
        assert done.returncode == 2
        assert message in done.stderr and "Traceback" not in done.stderr


def test_bench_on_a_gpu_that_is_not_here_is_one_line(warm_python, monkeypatch):
    pytest.importorskip("torch")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    done = warm_python("-m", "flash_attention", "bench", "--device", "cuda")
    assert done.returncode == 2
    assert done.stderr.strip() == "bench: --device: got cuda, but torch sees no NVIDIA GPU here; allowed: cpu"


def test_version():
    assert flash_attention.version() == flash_attention.__version__
    assert flash_attention.__version__.count(".") == 2
