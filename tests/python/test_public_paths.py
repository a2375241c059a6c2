"""Every path by which programs import something of the package: a module may move, its path stays."""

import importlib
import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest

PATHS = dict(line.partition(": ")[::2] for line in Path(__file__).with_name("public_paths.txt").read_text().splitlines())
_NEEDS = {"flash_attention.engines.vllm": "vllm", "flash_attention.engines.sglang": "sglang", "flash_attention.jax": "jax"}
_NEEDS |= {"flash_attention.hugging_face": "transformers"}


@pytest.mark.parametrize("path", PATHS)
def test_it_is_there(path):
    needs = _NEEDS.get(path)
    if needs and importlib.util.find_spec(needs) is None:
        assert importlib.util.find_spec(path) is not None
        return
    module = importlib.import_module(path)
    assert [name for name in PATHS[path].split() if not hasattr(module, name)] == []


def test_the_short_path_of_an_entrance_is_the_same_module():
    """Whichever is imported first: there is one module, and it knows itself by one name."""
    program = """
import sys
import flash_attention.flash_attn.bert_padding as short
import flash_attention.compat.flash_attn.bert_padding as whole
import flash_attention.compat.flashinfer, flash_attention.flashinfer
from flash_attention import flash_attn, flash_mla
assert short is whole and sys.modules["flash_attention.flash_attn"] is flash_attn is flash_attention.compat.flash_attn
assert flash_attention.flashinfer is flash_attention.compat.flashinfer
for module in (short, flash_attn, flash_mla):
    assert module.__name__.startswith("flash_attention.compat.") and module.__spec__.name == module.__name__
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_what_is_not_there_is_not_found():
    with pytest.raises(ImportError, match=r"flash_attn\.nothing"):
        importlib.import_module("flash_attention.flash_attn.nothing")
    with pytest.raises(ImportError, match="nothing"):
        exec("from flash_attention.flash_attn import nothing")
    assert importlib.util.find_spec("flash_attention.flash_attn_nothing") is None
